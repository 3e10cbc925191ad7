"""What happens to logits before a token is drawn from them, and what is said about them afterwards.

row_rules    what one row asks: biases, penalties with their counts, ids that are out
adjust       the rules of all rows of a batch, applied at once
score        log-probabilities, ranks and alternatives of tokens
highest      exactly the k highest of each row
"""
