"""What the field also does, beside what the core does: to compare with, and to learn from.  The core needs none of it."""
