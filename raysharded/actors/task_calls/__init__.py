"""The boundary to a task's code: its errors, its numbers, its objects' contents, and the settings that it changes."""
