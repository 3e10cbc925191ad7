"""The public gRPC API: messages to our words and back, and calls into the engine."""
