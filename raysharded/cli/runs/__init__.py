"""Commands on runs: list, inspect, watch and change them."""
