"""Plan a cluster: how to split a model over devices, from its config and the rates of devices and links alone."""
