"""Plan a cluster: how to share a model out over devices, from its config and the rates of devices and links alone."""
