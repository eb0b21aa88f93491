"""What the server answers: one module per subject of requests."""
