"""The gradient side: FSDP2, packed batches, the policy update and checkpoints."""
