"""Token stores: tokens on any storage, in shards that are read at random, with caches and exact read-ahead."""
