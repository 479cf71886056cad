"""DSpark at run time: what to draft, how much of it, and which drafts stand."""
