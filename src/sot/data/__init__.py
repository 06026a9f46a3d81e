"""Data: images through timm.data, text from GLUE's files, tables or a built-in grammar."""
