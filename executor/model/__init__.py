"""The model: loading, what is refused, its description, and its forward pass over a paged arena.

One path only: the modeling code of `transformers`, with its attention replaced. Passes that rewrite a loaded model in
place come here too, one file each.
"""
