"""Going back: because of a number that is not finite, of wrong results, or by request."""
