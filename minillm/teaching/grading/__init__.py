"""Grade many submissions: each in its own process with limits, without the answers, without trusting what it says."""
