"""The network clinic: broken programs on two hosts as patients."""
