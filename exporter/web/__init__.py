"""HTTP pages of this project: TLS, who may see what, where a page listens, and how much clients can take."""
