from tfdpx.train.data.builders import *  # noqa
from tfdpx.train.data.datasets import *  # noqa
from tfdpx.train.data.datasets import ENTRIES, FOLDER, KNOWN, TABLES, Name, find  # noqa
