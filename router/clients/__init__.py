"""The other processes as the router sees them: gRPC ends here."""
