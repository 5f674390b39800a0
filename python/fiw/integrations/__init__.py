"""What plugs the workspace into other people's libraries; each module needs its own library alone."""
