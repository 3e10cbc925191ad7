"""Who calls, what they may have, and what they have had."""
