"""The worker's process: its environment, and why and when it leaves."""
