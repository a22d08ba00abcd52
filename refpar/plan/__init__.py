"""What a layout costs: formulas of traffic and time, which tests hold beside what was counted."""
