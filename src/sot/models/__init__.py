"""What has tokens: the SoT family and its embeddings. Importing any of it registers all with timm and transformers."""

from sot.models import modeling as modeling
from sot.models import vision as vision
from sot.paper import peers as peers
