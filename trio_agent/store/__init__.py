"""What survives: durable checkpoints, transcripts and journals."""
