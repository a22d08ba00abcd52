"""What the wires check, and how they tell it: calls that must agree, buffers that are touched too early, waits and letters in words, and
the board on which processes find a deadlock.

The room stands beside `watch`, below `comm`: it knows call sites, shapes and options, and sends nothing.
"""
