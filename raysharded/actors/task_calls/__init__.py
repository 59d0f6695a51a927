"""The boundary to the code of a task: its errors, its numbers, and what it holds and leaves changed."""
