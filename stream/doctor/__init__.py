"""The stall doctor: what a run waits for, when that is a stall, and the words for it."""
