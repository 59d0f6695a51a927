"""The run's checkpoints as the driver sees them: begun, committed, requested, protected."""
