"""What a user writes: tool, reward and config, with a README of how to run it and what came out."""
