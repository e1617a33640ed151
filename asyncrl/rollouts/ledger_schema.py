"""The tables of ``<run>/ledger/ledger.sqlite``. They are public: read them with sqlite3, pandas or DuckDB at any time.

    import pandas, sqlite3
    db = sqlite3.connect("file:outputs/RUN/ledger/ledger.sqlite?mode=ro", uri=True)
    pandas.read_sql("SELECT cut_version, avg(reward) FROM samples JOIN groups USING (ordinal) GROUP BY 1", db)

Times are seconds since the epoch (UTC). Version v of the weights is the number of batches consumed: the cut of version
v is trained at v and makes v + 1. (segment, offset, length, crc) locate a payload in ``segments/NNNNNN.seg``
(asyncrl.rollouts.segments); files that no restart can need are deleted, the rows stay.
"""

from __future__ import annotations

SCHEMA_VERSION = 1

TABLES = """
CREATE TABLE meta (               -- what a resumed run must agree with, and the prompt cursor
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL             -- JSON
) WITHOUT ROWID;

CREATE TABLE groups (             -- every group that was ever admitted
  ordinal INTEGER PRIMARY KEY,    -- order of admission
  item_id TEXT NOT NULL,          -- of the prompt, such as train:17
  item_index INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  size INTEGER NOT NULL,          -- samples asked for
  admitted_version INTEGER NOT NULL,  -- the slowest live generator's: no token is older
  generator TEXT NOT NULL,        -- it was sent to last
  dispatches INTEGER NOT NULL,    -- 1 + times it was sent again
  status TEXT NOT NULL CHECK (status IN ('in_flight', 'finished', 'filtered', 'failed', 'taken')),
  reason TEXT,                    -- of filtered and failed
  cut_version INTEGER,            -- of taken: the batch that trains it
  segment INTEGER, offset INTEGER, length INTEGER, crc INTEGER,  -- payload: prompt token ids, entry
  time REAL NOT NULL              -- of admission
);
CREATE INDEX groups_status ON groups (status);
CREATE INDEX groups_cut ON groups (cut_version);

CREATE TABLE samples (            -- every completion that was finished
  ordinal INTEGER NOT NULL,
  sample_index INTEGER NOT NULL,  -- in its group
  generator TEXT NOT NULL,
  n_tokens INTEGER NOT NULL,
  finish_reason TEXT NOT NULL,    -- the engine's: stop, length
  min_version INTEGER,            -- over its tokens
  max_version INTEGER,
  reward REAL,                    -- reward or failure is set once it is scored
  failure TEXT,
  segment INTEGER, offset INTEGER, length INTEGER, crc INTEGER,  -- payload: token ids, log-probs, versions, text
  time REAL NOT NULL,
  PRIMARY KEY (ordinal, sample_index)
) WITHOUT ROWID;

CREATE TABLE cuts (               -- batches; durable before they are trained
  version INTEGER PRIMARY KEY,
  ordinals TEXT NOT NULL,         -- JSON list, in the order of the batch
  time REAL NOT NULL
);

CREATE TABLE steps (              -- what became of them
  version INTEGER PRIMARY KEY,
  outcome TEXT NOT NULL CHECK (outcome IN ('trained', 'skipped')),
  reason TEXT,                    -- of skipped
  metrics TEXT NOT NULL,          -- JSON
  applied INTEGER NOT NULL,       -- 1 + times it was applied again after a restart
  time REAL NOT NULL
);

CREATE TABLE commits (            -- a generator samples with this version from this time on
  version INTEGER NOT NULL,
  generator TEXT NOT NULL,
  time REAL NOT NULL
);

CREATE TABLE checkpoints (
  version INTEGER PRIMARY KEY,
  time REAL NOT NULL
);

CREATE TABLE events (             -- anything else: joined, left, dropped_sample, resumed, abandoned
  id INTEGER PRIMARY KEY,
  time REAL NOT NULL,
  kind TEXT NOT NULL,
  detail TEXT NOT NULL            -- JSON
);
"""
