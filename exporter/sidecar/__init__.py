"""The sidecar process: its page, HTTP service, background reads, and the list of collectors."""
