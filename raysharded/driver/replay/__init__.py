"""A recorded run once more: `load` reads one, and what its drivers were told goes through the machine again."""
