"""One generation after another: formed, prepared, paused, ended; and the steps that it reports."""
