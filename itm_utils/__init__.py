"""What every chapter of the book shares and no paper is about."""

__version__ = "0.2.0"
