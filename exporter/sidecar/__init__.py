"""The sidecar process: page, HTTP service, background reads, and list of collectors."""
