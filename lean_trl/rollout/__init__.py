"""Where the sequences of online methods come from: engines, rewards, the buffer, the feed."""
