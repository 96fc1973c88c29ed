"""What `pillarbox demo` runs: a shop, its writers, a relay that is killed, and a reader that keeps count."""
