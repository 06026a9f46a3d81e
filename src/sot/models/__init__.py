"""What has tokens: the SoT family and its token embeddings."""
