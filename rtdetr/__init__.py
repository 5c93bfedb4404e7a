"""RT-DETRv3: a real-time object detector."""

__version__ = "0.1.0"
