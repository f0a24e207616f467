-- The tables of the queue. Rights are granted in the last migration: nobody but the owner reads or writes these
-- directly; every role goes through functions.
--
-- Naming: an open job is in exactly one of `blocked`, `ready` and `running`; every transition deletes the row of the
-- state it leaves. Everything else about a job (`job`, `job_input`, `output`) does not change while it waits, which
-- keeps the hot tables narrow and lets a claim cost the same at ten thousand jobs and at a million.
--
-- Paths and names collate as bytes: a probe of an index by a language's rules costs three times as much.

-- The one clock of the queue. Tests replace it in their own database; nothing else calls clock_timestamp().
CREATE FUNCTION ci.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
  AS $$ SELECT clock_timestamp() $$;

-- A moment as RFC 3339 writes it.
CREATE FUNCTION ci.moment(p_moment timestamptz) RETURNS text LANGUAGE sql STABLE
  AS $$ SELECT to_char(p_moment AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') $$;

CREATE TYPE ci.job_state AS ENUM ('open', 'cached', 'succeeded', 'failed', 'dep_failed', 'cancelled');
CREATE TYPE ci.phase AS ENUM ('building', 'uploading', 'accepted');
CREATE TYPE ci.evaluation_state AS ENUM ('queued', 'evaluating', 'complete', 'aborted', 'cancelled');

-- What a failure means. `permanent`: ends the job at once; otherwise it is retried. `sticky`: a new evaluation does
-- not reopen it, only a person does. `blames_node`: three in a row and the node stops claiming.
CREATE TABLE ci.failure_kind (
  kind        text PRIMARY KEY,
  permanent   bool NOT NULL,
  sticky      bool NOT NULL,
  blames_node bool NOT NULL
);
INSERT INTO ci.failure_kind VALUES
  ('build_error',   true,  true,  false),
  ('timeout',       true,  true,  false),
  ('silent',        true,  true,  false),
  ('output_size',   true,  true,  false),
  ('hash_mismatch', true,  true,  false),
  ('not_buildable', true,  true,  false),
  ('fetch',         false, false, false),
  ('missing_feature', false, false, true),
  ('oom',           false, false, true),
  ('disk_full',     false, false, true),
  ('network',       false, false, true),
  ('stale_input',   false, false, false),
  ('daemon_gone',   false, false, true),
  ('upload',        false, false, true),
  ('node_died',     false, false, false),
  ('interrupted',   false, false, false),
  ('unsupported',   true,  false, false),
  ('source_lost',   true,  false, false),
  ('not_published', true,  false, false);

------------------------------------------------------------------------------------------------ who and what for

CREATE TABLE ci.project (
  id              int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name            text NOT NULL CONSTRAINT project_name_unique UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 200),
  shares          int NOT NULL DEFAULT 100 CHECK (shares BETWEEN 1 AND 1000000),
  max_concurrent  int CHECK (max_concurrent BETWEEN 0 AND 10000),  -- NULL: no limit
  pools           int[],                                           -- NULL: every pool
  untrusted_pools int[] NOT NULL DEFAULT '{}',                     -- where evaluations of outside changes build
  paused          bool NOT NULL DEFAULT false,
  retention       interval NOT NULL DEFAULT '90 days',
  created_at      timestamptz NOT NULL DEFAULT ci.clock(),
  deleted_at      timestamptz,
  -- Kept by a custom resource, which may name pools that are not there yet: pools and untrusted_pools follow these.
  k8s_uid             text CHECK (octet_length(k8s_uid) BETWEEN 1 AND 100),
  k8s_generation      bigint,
  k8s_pools           text[] CHECK (cardinality(k8s_pools) <= 100),
  k8s_untrusted_pools text[] CHECK (cardinality(k8s_untrusted_pools) <= 100)
);

-- One row per unit of max_concurrent. A claim through a limited project takes a free row with SKIP LOCKED, so the
-- limit holds under any number of simultaneous claimers and none of them waits for another.
CREATE TABLE ci.permit (
  project_id int NOT NULL,
  n          int NOT NULL,
  job_id     bigint,
  PRIMARY KEY (project_id, n)
) WITH (fillfactor = 50);
CREATE INDEX permit_job ON ci.permit (job_id) WHERE job_id IS NOT NULL;

CREATE TABLE ci.pool (
  id                 int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name               text NOT NULL CONSTRAINT pool_name_unique UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 200),
  login              name NOT NULL UNIQUE,   -- the database login of its builders: a session's pool follows from it
  systems            text[] NOT NULL CHECK (cardinality(systems) BETWEEN 1 AND 32),
  features           text[] NOT NULL DEFAULT '{benchmark,big-parallel,nixos-test}',   -- Nix's own default
  mandatory_features text[] NOT NULL DEFAULT '{}',
  slots              int NOT NULL DEFAULT 1 CHECK (slots BETWEEN 1 AND 1024),         -- the most one session may have
  memory             bigint NOT NULL DEFAULT 0 CHECK (memory >= 0),                   -- bytes that a build has which is alone on a node; 0: nobody said
  at_maximum         bool NOT NULL DEFAULT false,                                     -- the operator cannot add nodes
  note               text CHECK (octet_length(note) <= 2000),                         -- what keeps nodes from running that it should have
  deleted_at         timestamptz,
  k8s_uid            text CHECK (octet_length(k8s_uid) BETWEEN 1 AND 100),            -- kept by a custom resource
  k8s_generation     bigint
);

-- A kind of work: one system, one set of required features, and the memory that was too little for it, if any was.
-- Capability matching is done once per class and node type, never per job.
CREATE TABLE ci.class (
  id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  system       text NOT NULL CHECK (octet_length(system) BETWEEN 1 AND 100),
  features     text[] NOT NULL DEFAULT '{}',
  memory       bigint NOT NULL DEFAULT 0,                 -- bytes that its jobs have outgrown: only where there are more
  last_capable timestamptz NOT NULL DEFAULT ci.clock(),   -- when a pool or node that could run it was last seen
  UNIQUE (system, features, memory)
);
CREATE INDEX class_outgrown ON ci.class (id) WHERE memory > 0;

-- A project's place in one class. `used` is settled builder time, `inflight` what its running builds are charged;
-- both are written by the resolver's fold only. tier 0 is trusted, 1 is an outside change.
CREATE TABLE ci.lane (
  id         int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  project_id int NOT NULL REFERENCES ci.project,
  tier       smallint NOT NULL CHECK (tier IN (0, 1)),
  class_id   int NOT NULL REFERENCES ci.class,
  used       float8 NOT NULL DEFAULT 0,
  inflight   float8 NOT NULL DEFAULT 0,
  active     bool NOT NULL DEFAULT false,    -- has ready or running jobs, as far as the resolver knows
  top        smallint NOT NULL DEFAULT 0,    -- highest manual priority among its ready jobs
  UNIQUE (project_id, tier, class_id)
) WITH (fillfactor = 50);

-- What a type of node may claim, in the order in which it should ask. One row per distinct capability set, read by
-- every claim, rewritten by ci.rank() when the order changes: a claim needs no join with projects or usage.
-- turn i: project projects[i], rank ranks[i] (used seconds per share), its lanes lanes[firsts[i] .. firsts[i+1]-1].
CREATE TABLE ci.profile (
  id        int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pool_id   int NOT NULL REFERENCES ci.pool,
  systems   text[] NOT NULL,
  features  text[] NOT NULL,
  mandatory text[] NOT NULL,
  memory    bigint NOT NULL,
  classes   int[] NOT NULL DEFAULT '{}',
  projects  int[] NOT NULL DEFAULT '{}',
  ranks     float8[] NOT NULL DEFAULT '{}',
  weights   float8[] NOT NULL DEFAULT '{}',   -- 1 / shares
  tops      smallint[] NOT NULL DEFAULT '{}',
  limits    int[] NOT NULL DEFAULT '{}',      -- max_concurrent, NULL for none
  whole     bool[] NOT NULL DEFAULT '{}',     -- these are all lanes of the project
  firsts    int[] NOT NULL DEFAULT '{}',      -- and one past the last lane
  lanes     int[] NOT NULL DEFAULT '{}',
  UNIQUE (pool_id, systems, features, mandatory, memory)
) WITH (fillfactor = 50);

------------------------------------------------------------------------------------------------ evaluations, graph

CREATE TABLE ci.evaluation (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  project_id  int NOT NULL REFERENCES ci.project,
  tier        smallint NOT NULL DEFAULT 0 CHECK (tier IN (0, 1)),
  state       ci.evaluation_state NOT NULL DEFAULT 'queued',
  source      text NOT NULL CHECK (octet_length(source) <= 4096),
  branch      text CHECK (octet_length(branch) <= 1024),
  commit_id   text CHECK (octet_length(commit_id) <= 200),
  error       text CHECK (octet_length(error) <= 65536),
  pinned      bool NOT NULL DEFAULT false,
  attrs       text[] NOT NULL DEFAULT '{}' CHECK (octet_length(array_to_string(attrs, ' ')) <= 65536),   -- asked for; none: the source's default
  attempt     int NOT NULL DEFAULT 0,      -- how often an evaluator began it
  evaluator   text CHECK (octet_length(evaluator) <= 253),
  lease_until timestamptz,                 -- NULL: whoever made it writes it
  secret_hash bytea,                       -- of what its evaluator shows to signers
  created_at  timestamptz NOT NULL DEFAULT ci.clock(),
  started_at  timestamptz,
  ended_at    timestamptz
);
CREATE INDEX evaluation_page ON ci.evaluation (project_id, id DESC);
CREATE INDEX evaluation_branch ON ci.evaluation (project_id, branch, id DESC);
CREATE INDEX evaluation_unfinished ON ci.evaluation (state, id) WHERE state IN ('queued', 'evaluating');

CREATE TABLE ci.evaluation_attr (
  evaluation_id bigint NOT NULL REFERENCES ci.evaluation ON DELETE CASCADE,
  attr          text COLLATE "C" NOT NULL CHECK (octet_length(attr) <= 4096),
  job_id        bigint,
  error         text CHECK (octet_length(error) <= 65536),
  PRIMARY KEY (evaluation_id, attr)
);
CREATE INDEX evaluation_attr_job ON ci.evaluation_attr (job_id);

-- One row per derivation, whoever asks for it. `cached`: a substituter has its outputs, there is nothing to do.
-- `depth` is the longest chain of inputs below it (it chooses the watch), `height` the longest chain of dependents
-- above it (it chooses the order). Neither counts what is cached.
CREATE TABLE ci.job (
  id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  drv_path      text COLLATE "C" NOT NULL CONSTRAINT job_drv_path_unique UNIQUE CHECK (octet_length(drv_path) BETWEEN 5 AND 300),
  class_id      int NOT NULL,
  depth         int NOT NULL DEFAULT 0,
  height        int NOT NULL DEFAULT 0,
  state         ci.job_state NOT NULL DEFAULT 'open',
  priority      smallint NOT NULL DEFAULT 0,
  retries       smallint NOT NULL DEFAULT 0,
  interruptions smallint NOT NULL DEFAULT 0,
  avoid         int,                 -- the node that failed it last
  failure       text,                -- ci.failure_kind of the end, or of the last attempt
  root          bigint,              -- dep_failed: the job that failed first
  error         text CHECK (octet_length(error) <= 8192),
  created_at    timestamptz NOT NULL DEFAULT ci.clock(),
  ended_at      timestamptz
) WITH (fillfactor = 80);
CREATE INDEX job_failed ON ci.job (class_id) WHERE failure = 'unsupported';

-- The derivation's text, apart from `job` so that a change of state does not rewrite it.
CREATE TABLE ci.aterm (
  job_id bigint PRIMARY KEY,
  text   bytea NOT NULL CONSTRAINT aterm_size CHECK (octet_length(text) <= 4194304)
);
DO $$ BEGIN
  ALTER TABLE ci.aterm ALTER COLUMN text SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN NULL;   -- a server built without lz4 keeps its default
END $$;

-- What a signer has proven about a derivation: that its path follows from its text, and its outputs from that and from
-- its inputs. The bytes are what the proofs of its dependents need.
CREATE TABLE ci.proof (
  job_id bigint PRIMARY KEY,
  proof  bytea NOT NULL CHECK (octet_length(proof) <= 4096)
);

CREATE TABLE ci.job_input (
  referrer bigint NOT NULL,
  input    bigint NOT NULL,
  PRIMARY KEY (referrer, input)
);
CREATE INDEX job_input_input ON ci.job_input (input, referrer);

CREATE TABLE ci.output (
  job_id bigint NOT NULL,
  name   text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
  path   text COLLATE "C" CHECK (octet_length(path) BETWEEN 5 AND 300),    -- NULL until built: it, or an input, has a floating content address
  realised bool NOT NULL DEFAULT false,                                    -- a signer has the path of a build, nobody's word before it
  PRIMARY KEY (job_id, name)
);
CREATE INDEX output_path ON ci.output (path);

-- What a store path is, once and for all: the first accepted attempt, an upstream substituter or an uploaded source.
CREATE TABLE ci.canonical (
  path        text COLLATE "C" PRIMARY KEY,
  nar_hash    bytea NOT NULL CHECK (octet_length(nar_hash) = 32),
  nar_size    bigint NOT NULL CHECK (nar_size >= 0),
  refs        text[] NOT NULL DEFAULT '{}',
  file_hash   bytea CHECK (octet_length(file_hash) = 32),      -- NULL: not in our bucket
  file_size   bigint,
  ca          text CHECK (octet_length(ca) <= 300),
  job_id      bigint,
  attempt     bigint,
  node_id     int,
  recorded_at timestamptz NOT NULL DEFAULT ci.clock()
);

-- Jobs that share an output path with another: only these look for a leader to follow.
CREATE TABLE ci.twin (job_id bigint PRIMARY KEY);

CREATE TABLE ci.want (
  job_id        bigint NOT NULL,
  evaluation_id bigint NOT NULL,
  PRIMARY KEY (job_id, evaluation_id)
);
CREATE INDEX want_evaluation ON ci.want (evaluation_id, job_id);

------------------------------------------------------------------------------------------------ states of open jobs

-- Waits for `watch`, or for `run_at`, or (both NULL) for an event that names it or a report in `missing`.
CREATE TABLE ci.blocked (
  job_id bigint PRIMARY KEY,
  watch  bigint,
  run_at timestamptz
) WITH (fillfactor = 80);
CREATE INDEX blocked_watch ON ci.blocked (watch, job_id);
CREATE INDEX blocked_run_at ON ci.blocked (run_at) WHERE run_at IS NOT NULL;

-- Claimable. The row is the state: whoever deletes it owns the transition.
CREATE TABLE ci.ready (
  job_id   bigint PRIMARY KEY,
  class_id int NOT NULL,
  estimate real NOT NULL,                        -- seconds a claim charges
  avoid    int,                                  -- not on this node
  since    timestamptz NOT NULL
);
CREATE INDEX ready_avoid ON ci.ready (job_id) WHERE avoid IS NOT NULL;

-- How the lanes see a ready job, in claiming order: one row per lane that may claim it. Only the owner of the `ready`
-- row (its lock) writes its offers, so claims of one job through two lanes meet at that row and nowhere else.
CREATE TABLE ci.offer (
  project_id    int NOT NULL,
  lane_id       int NOT NULL,
  urgency       smallint NOT NULL,               -- minus the manual priority
  evaluation_id bigint NOT NULL,                 -- the oldest that wants it in this lane
  shortness     int NOT NULL,                    -- minus height
  job_id        bigint NOT NULL,
  PRIMARY KEY (project_id, urgency, evaluation_id, shortness, job_id)
);
CREATE INDEX offer_lane ON ci.offer (lane_id, urgency, evaluation_id, shortness, job_id);
CREATE INDEX offer_job ON ci.offer (job_id);

CREATE SEQUENCE ci.attempt_number CACHE 32;

CREATE TABLE ci.running (
  job_id      bigint PRIMARY KEY,
  attempt     bigint NOT NULL,
  session_id  bigint NOT NULL,
  node_id     int NOT NULL,
  lane_id     int NOT NULL,                      -- the lane that pays
  phase       ci.phase NOT NULL DEFAULT 'building',
  cancelled   bool NOT NULL DEFAULT false,
  refused     bigint NOT NULL DEFAULT 0,         -- a person cancelled it: evaluations up to this one do not count as wanting it
  permit      bool NOT NULL,
  estimate    real NOT NULL,
  claimed_at  timestamptz NOT NULL,
  uploaded_at timestamptz,                       -- when the upload began: the slot was free from then on
  lease_until timestamptz NOT NULL
) WITH (fillfactor = 60);
CREATE INDEX running_session ON ci.running (session_id);
CREATE INDEX running_lease ON ci.running (lease_until);

-- Jobs that may have become nobody's: retention looks at them and, one by one, at their inputs.
CREATE TABLE ci.orphan (job_id bigint PRIMARY KEY);

-- The resolver's inbox. 'e': look at job `subject`; 'u': and whether anybody wants it; 'd': it ended, look at what
-- depends on it; 'o': it was opened again, likewise; 'v': look at everything that evaluation `subject` wants; 'p':
-- profiles, classes or projects changed. `cursor` is how far the fan-out of this event has come.
CREATE TABLE ci.event (
  id      bigint GENERATED ALWAYS AS IDENTITY (CACHE 32) PRIMARY KEY,
  kind    "char" NOT NULL,
  subject bigint NOT NULL,
  cursor  bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 80);

-- Jobs whose rows a builder had locked when the resolver came by: looked at again at the next fold.
CREATE TABLE ci.passed_over (job_id bigint PRIMARY KEY);

-- Finished use of a slot, until the next fold adds it to its lane and to what is known about names and nodes.
CREATE TABLE ci.ledger (
  lane_id int NOT NULL,
  seconds real NOT NULL,
  job_id  bigint,          -- NULL: charged, but says nothing about how long the job takes
  node_id int
);

-- One row. Its lock is what makes a resolver step the only one; no builder can reach it.
CREATE TABLE ci.resolver (
  id         int PRIMARY KEY CHECK (id = 1),
  folded_at  timestamptz NOT NULL DEFAULT '-infinity',
  decayed_at timestamptz NOT NULL DEFAULT ci.clock()
);
INSERT INTO ci.resolver (id) VALUES (1);

-- One row. Ingest holds it shared, a step that cancels holds it alone: a want in flight is never overlooked.
CREATE TABLE ci.gate (id int PRIMARY KEY CHECK (id = 1));
INSERT INTO ci.gate VALUES (1);

------------------------------------------------------------------------------------------------ nodes and sessions

CREATE TABLE ci.node (
  id          int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pool_id     int NOT NULL REFERENCES ci.pool,
  name        text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 253),
  secret_hash bytea NOT NULL,                     -- of the secret on the node's own volume
  kube_node   text CHECK (octet_length(kube_node) <= 253),
  speed       real NOT NULL DEFAULT 1,            -- against the fleet, for the same names
  UNIQUE (pool_id, name)
);
CREATE INDEX node_kube ON ci.node (kube_node);

CREATE TABLE ci.session (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  node_id     int NOT NULL REFERENCES ci.node,
  profile_id  int NOT NULL REFERENCES ci.profile,
  login       name NOT NULL,
  secret_hash bytea NOT NULL,
  slots       int NOT NULL CHECK (slots BETWEEN 1 AND 1024),
  version     text CHECK (octet_length(version) <= 100),
  streak      smallint NOT NULL DEFAULT 0,        -- failures in a row that were the node's own
  started_at  timestamptz NOT NULL DEFAULT ci.clock(),
  last_seen   timestamptz NOT NULL DEFAULT ci.clock(),
  ended_at    timestamptz
) WITH (fillfactor = 50);
CREATE INDEX session_node ON ci.session (node_id, id DESC);
CREATE INDEX session_live ON ci.session (last_seen) WHERE ended_at IS NULL;

-- Why a node drains. session_id 0: the node's own, a new session of it is born draining; else that session's.
CREATE TABLE ci.drain (
  node_id    int NOT NULL REFERENCES ci.node,
  session_id bigint NOT NULL DEFAULT 0,
  reason     text NOT NULL CHECK (octet_length(reason) BETWEEN 1 AND 200),
  deadline   timestamptz,
  since      timestamptz NOT NULL DEFAULT ci.clock(),
  PRIMARY KEY (node_id, session_id, reason)
);

-- Ended attempts. The number is the fence a claim handed out.
CREATE TABLE ci.attempt (
  id         bigint NOT NULL,
  job_id     bigint NOT NULL,
  session_id bigint NOT NULL,
  lane_id    int NOT NULL,
  claimed_at timestamptz NOT NULL,
  ended_at   timestamptz NOT NULL,
  outcome    text NOT NULL,                       -- succeeded, a ci.failure_kind, or cancelled
  message    text,
  PRIMARY KEY (job_id, id)
);
CREATE INDEX attempt_session ON ci.attempt (session_id, id);

-- How long builds of a name took, most recent first, versions not counted.
CREATE TABLE ci.duration (
  name   text COLLATE "C" PRIMARY KEY,
  recent real[] NOT NULL,
  p50    real NOT NULL
) WITH (fillfactor = 70);

-- The tail of a running build's log: a ring of 32 windows of 2 KiB by byte offset, so that it is bounded whatever is
-- appended and a reader resumes by offset. Unlogged: it may vanish in a crash, the full log does not pass here.
CREATE UNLOGGED TABLE ci.log_tail (
  job_id   bigint NOT NULL,
  slot     smallint NOT NULL,
  attempt  bigint NOT NULL,
  starts   bigint NOT NULL,                       -- byte offset of data
  data     bytea NOT NULL,
  PRIMARY KEY (job_id, slot)
) WITH (fillfactor = 50);
ALTER TABLE ci.log_tail ALTER COLUMN data SET STORAGE PLAIN;

-- An accepted record was contradicted by a second build of the same path.
CREATE TABLE ci.finding (
  id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  path           text COLLATE "C" NOT NULL,
  canonical_hash bytea NOT NULL,
  seen_hash      bytea NOT NULL,
  job_id         bigint NOT NULL,
  attempt        bigint NOT NULL,
  node_id        int NOT NULL,
  found_at       timestamptz NOT NULL DEFAULT ci.clock(),
  UNIQUE (path, attempt)
);

-- A builder could not fetch an input. The job waits until a signer has looked.
CREATE TABLE ci.missing (
  path        text COLLATE "C" NOT NULL,
  job_id      bigint NOT NULL,
  reported_at timestamptz NOT NULL DEFAULT ci.clock(),
  PRIMARY KEY (path, job_id)
);
CREATE INDEX missing_job ON ci.missing (job_id);

------------------------------------------------------------------------------------------------ control plane

CREATE TABLE ci.replica (
  id         uuid PRIMARY KEY,                    -- one per process incarnation's instance
  role       text NOT NULL CHECK (role IN ('operator', 'signer', 'frontend', 'evaluator', 'up')),
  url        text NOT NULL CHECK (octet_length(url) <= 1024),
  created_at timestamptz NOT NULL DEFAULT ci.clock(),
  last_beat  timestamptz NOT NULL DEFAULT ci.clock()
);

-- Who may use the API and the cache. The secret itself is shown once and not kept.
CREATE TABLE ci.token (
  id          int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name        text NOT NULL CONSTRAINT token_name_unique UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 200),
  scope       text NOT NULL CHECK (scope IN ('read', 'operate', 'admin')),
  secret_hash bytea NOT NULL UNIQUE,
  created_at  timestamptz NOT NULL DEFAULT ci.clock(),
  expires_at  timestamptz
);

CREATE TABLE ci.leadership (
  name       text PRIMARY KEY CHECK (name IN ('janitor', 'operator')),
  lock_key   bigint NOT NULL,
  generation bigint NOT NULL DEFAULT 0,
  replica_id uuid,
  pid        int,                                 -- the backend that holds the lock
  since      timestamptz,
  looked_at  timestamptz,                         -- when the janitor's reaper last did
  pruned_at  timestamptz                          -- when the janitor last looked for nodes that are of no use any more
);
-- "HCI_JAN" and "HCI_OPR" in ASCII.
INSERT INTO ci.leadership (name, lock_key) VALUES ('janitor', x'4843495f4a414e'::bigint), ('operator', x'4843495f4f5052'::bigint);

-- Rows come and go here by the thousand a minute: vacuum by count, not by fraction, and without pauses.
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['blocked', 'ready', 'offer', 'running', 'event', 'ledger', 'session', 'lane', 'profile', 'permit'] LOOP
    EXECUTE format('ALTER TABLE ci.%I SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
      autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0)', t);
  END LOOP;
END $$;
