"""torchrun, except that its exit code is the script's own and a failure adds no report to what the script said.

python records/launch.py --standalone --nproc_per_node=2 train_gpt.py --seed 1
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.ERROR)
    try:
        main()
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        sys.exit(code if code >= 0 else 128 - code)
    except SignalException as received:
        sys.exit(128 + received.sigval)
