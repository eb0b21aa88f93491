"""What the server remembers of connected clients."""
