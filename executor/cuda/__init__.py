"""What is an executor's own on a GPU."""
