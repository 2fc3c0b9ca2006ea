"""What gpujob says about itself: groups of commands, its version, and completion for shells."""
