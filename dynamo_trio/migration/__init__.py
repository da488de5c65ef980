"""What becomes of a request whose stream has ended badly. No I/O, no clock, no Trio.

:class:`Migration` follows one request and decides; it is not used by the programs yet.
"""

from dynamo_trio.migration.answer import Part as Part
from dynamo_trio.migration.decisions import Decision as Decision
from dynamo_trio.migration.decisions import Done as Done
from dynamo_trio.migration.decisions import End as End
from dynamo_trio.migration.decisions import GoOn as GoOn
from dynamo_trio.migration.decisions import Move as Move
from dynamo_trio.migration.decisions import MoveKind as MoveKind
from dynamo_trio.migration.decisions import MoveOutcome as MoveOutcome
from dynamo_trio.migration.decisions import Reason as Reason
from dynamo_trio.migration.failures import is_planned as is_planned
from dynamo_trio.migration.failures import may_move as may_move
from dynamo_trio.migration.machine import OTHERS as OTHERS
from dynamo_trio.migration.machine import Migration as Migration
from dynamo_trio.migration.machine import MigrationLimits as MigrationLimits
from dynamo_trio.migration.replay import DECLARED as DECLARED
from dynamo_trio.migration.replay import UNDECLARED as UNDECLARED
from dynamo_trio.migration.replay import Replay as Replay
from dynamo_trio.migration.replay import needs as needs
