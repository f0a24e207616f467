-- What is kept and what goes: pins, the sweep of the bucket, and what a resync finds there.
--
-- A path stays in the bucket while a job makes it, a derivation's text names it, or a path that stays refers to it. Jobs go with
-- the evaluations that wanted them (ci.retain); what they leave behind is swept in two phases. A plan marks it in ci.dying, and
-- after a grace a bounded step takes the record and the mark away together, so that nothing trusts the path when its objects go.
--
-- Two things hold at any moment after a plan: no path outside ci.dying refers to one in it, and no job makes one in it. Whoever
-- records a path or writes a job spares what it needs with everything below (ci.keep, ci.spare).

CREATE FUNCTION ci.pin(p_evaluation bigint, p_pinned bool) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM ci.evaluation WHERE id = p_evaluation) THEN
    PERFORM ci.refuse('HC007', format('there is no evaluation %s', p_evaluation));
  END IF;
  UPDATE ci.evaluation SET pinned = p_pinned WHERE id = p_evaluation AND pinned <> p_pinned;
  RETURN FOUND;
END $$;

-- Has nobody looked yet which branches there are, where the code is now?
CREATE FUNCTION ci.is_unexplored(s ci.project_source) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN ci.instance_of(s) IS NULL THEN NOT EXISTS (SELECT FROM ci.head h WHERE h.project_id = s.project_id)
         ELSE NOT EXISTS (SELECT FROM ci.comparison c WHERE c.project_id = s.project_id AND c.first_at IS NOT NULL) END
$$;

-- Is it what was pushed, or that once more, of the commit at which its branch, or pull request, is: also if that was set back to it.
CREATE FUNCTION ci.is_of_head(e ci.evaluation) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT (e.pushed OR e.repeats IS NOT NULL)
     AND (EXISTS (SELECT FROM ci.head h WHERE h.project_id = e.project_id AND h.branch = e.branch AND h.commit_id = e.commit_id)
          OR EXISTS (SELECT FROM ci.pull_request r WHERE r.project_id = e.project_id AND r.number = e.pull_request AND r.commit_id = e.commit_id))
     AND NOT EXISTS (SELECT FROM ci.evaluation l WHERE l.project_id = e.project_id AND l.branch = e.branch AND l.commit_id = e.commit_id
                     AND l.id > e.id AND l.state = 'complete' AND (l.pushed OR l.repeats IS NOT NULL))
$$;

-- Is it the last word on a branch? What was pushed, or that once more, is it only as long as the branch, or the pull request, is there.
CREATE FUNCTION ci.is_last(e ci.evaluation) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT (NOT EXISTS (SELECT FROM ci.evaluation l WHERE l.project_id = e.project_id AND l.branch = e.branch AND l.id > e.id AND l.state = 'complete')
          OR ci.is_of_head(e))                                                              -- fence: head_is_last
     AND NOT EXISTS (SELECT FROM ci.evaluation l WHERE l.project_id = e.project_id AND l.branch IS NULL AND e.branch IS NULL AND l.id > e.id AND l.state = 'complete')
     AND (NOT e.pushed AND e.repeats IS NULL
          OR EXISTS (SELECT FROM ci.head h WHERE h.project_id = e.project_id AND h.branch = e.branch)
          OR EXISTS (SELECT FROM ci.pull_request r WHERE r.project_id = e.project_id AND r.number = e.pull_request)
          OR EXISTS (SELECT FROM ci.project_source s WHERE s.project_id = e.project_id AND ci.is_unexplored(s)))
$$;

-- When its time is over: may it go? Neither what somebody pinned, nor the last complete one of a branch.
CREATE FUNCTION ci.may_go(e ci.evaluation) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT true
     AND NOT e.pinned                                                                       -- fence: pinned
     AND (e.state IN ('aborted', 'cancelled') OR NOT ci.is_last(e))                         -- fence: last_of_branch
$$;

------------------------------------------------------------------------------------------------ what is kept for texts

-- Store paths that a derivation's text names and no job makes: its sources.
CREATE TABLE ci.job_source (
  path   text COLLATE "C" NOT NULL,
  job_id bigint NOT NULL,
  PRIMARY KEY (path, job_id)
);
CREATE INDEX job_source_job ON ci.job_source (job_id);

-- Jobs that got another text under their old number: to be read again.
CREATE TABLE ci.unread (job_id bigint PRIMARY KEY);

------------------------------------------------------------------------------------------------ the sweep

-- One row. Who sweeps has a generation and a lease, which every step extends; no builder can reach it.
CREATE TABLE ci.sweep (
  id          int PRIMARY KEY CHECK (id = 1),
  generation  bigint NOT NULL DEFAULT 0,
  holder      text CHECK (octet_length(holder) <= 300),
  lease_until timestamptz NOT NULL DEFAULT '-infinity',
  began_at    timestamptz,
  ended_at    timestamptz NOT NULL DEFAULT '-infinity',
  read_to     bigint NOT NULL DEFAULT 0,       -- texts of jobs up to this one were read for their sources
  read_limit  bigint NOT NULL DEFAULT 0        -- up to here no text is on its way any more
);
INSERT INTO ci.sweep (id) VALUES (1);

-- Nobody needs these paths. since NULL: the plan is not finished. Every row is written twice: half of each page is left for that,
-- and no index looks at what is written.
CREATE TABLE ci.dying (
  path        text COLLATE "C" PRIMARY KEY,
  recorded_at timestamptz NOT NULL,            -- what refers to a path was recorded after it: the last go first
  since       timestamptz
) WITH (fillfactor = 50);
CREATE INDEX dying_last ON ci.dying (recorded_at DESC);

-- Forgotten, and their objects are being removed, or were a moment ago: nobody may publish them meanwhile.
CREATE TABLE ci.condemned (
  path      text COLLATE "C" PRIMARY KEY,
  nar_hash  bytea NOT NULL,
  attempt   bigint,
  file_size bigint NOT NULL,
  buried_at timestamptz
);

CREATE FUNCTION ci.sweep_lease() RETURNS interval LANGUAGE sql IMMUTABLE AS $$ SELECT interval '2 minutes' $$;

-- Takes the sweep, if nobody has it and, with p_every, if the last one is so long ago or broke off. NULL: not now.
CREATE FUNCTION ci.begin_sweep(p_holder text, p_every interval DEFAULT NULL) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_generation bigint; v_now timestamptz := ci.clock();
BEGIN
  UPDATE ci.sweep SET generation = generation + 1, holder = p_holder, lease_until = v_now + ci.sweep_lease(), began_at = v_now
  WHERE (p_every IS NULL OR ended_at < v_now - p_every OR EXISTS (SELECT FROM ci.condemned WHERE buried_at IS NULL))
    AND lease_until < v_now                                                                 -- fence: one_sweep
  RETURNING generation INTO v_generation;
  RETURN v_generation;
END $$;

CREATE FUNCTION ci.sweep_state() RETURNS TABLE (holder text, running bool, began_at text, ended_at text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT s.holder, s.lease_until > ci.clock(), ci.moment(s.began_at), ci.moment(nullif(s.ended_at, '-infinity')) FROM ci.sweep s
$$;

CREATE FUNCTION ci.require_sweeper(p_generation bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.sweep SET lease_until = ci.clock() + ci.sweep_lease()
  WHERE lease_until > ci.clock()
    AND generation = p_generation;                                                          -- fence: sweep_generation
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC005', format('sweep %s is over: it was silent for too long', p_generation));
  END IF;
END $$;

-- p_whole: the next one is due only after its time.
CREATE FUNCTION ci.end_sweep(p_generation bigint, p_whole bool) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  UPDATE ci.sweep SET lease_until = '-infinity', ended_at = CASE WHEN p_whole THEN ci.clock() ELSE ended_at END;
END $$;

-- These paths are needed, hence all they refer to.
CREATE FUNCTION ci.spare(p_paths text[]) RETURNS int LANGUAGE plpgsql AS $$
DECLARE v_next text[] := p_paths; v_spared text[]; v_count int := 0;
BEGIN
  LOOP
    WITH spared AS (DELETE FROM ci.dying WHERE path = ANY (v_next) RETURNING path) SELECT array_agg(path) INTO v_spared FROM spared;
    EXIT WHEN v_spared IS NULL;
    v_count := v_count + cardinality(v_spared);
    SELECT array_agg(DISTINCT r) INTO v_next FROM ci.canonical c CROSS JOIN LATERAL unnest(c.refs) r WHERE c.path = ANY (v_spared);
  END LOOP;
  RETURN v_count;
END $$;

-- For whoever records paths: they and what they refer to (lists separated by blanks) are spared. Answers those that are being
-- removed at this moment. For two minutes after that, too: an object that was seen before must not be counted on.
CREATE FUNCTION ci.keep(p_paths text[], p_refs text[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT FROM ci.dying) THEN
    PERFORM ci.spare(p_paths || ARRAY(SELECT DISTINCT x FROM unnest(p_refs) r CROSS JOIN LATERAL unnest(string_to_array(r, ' ')) x));
  END IF;
  RETURN ARRAY(SELECT c.path FROM ci.condemned c WHERE c.path = ANY (p_paths)
    AND (c.buried_at IS NULL OR c.buried_at > ci.clock() - ci.sweep_lease()));
END $$;

-- Of paths that an evaluation is about to name, those that are there: they are spared as of now, for its texts come later.
CREATE FUNCTION ci.keep_published(p_paths text[]) RETURNS SETOF text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.keep(p_paths, '{}');
  RETURN QUERY SELECT c.path FROM ci.canonical c WHERE c.path = ANY (p_paths) AND c.file_hash IS NOT NULL;
END $$;

-- Reads texts for the sources they name, p_rows at a time; 0: all were read. Numbers are handed out in order and committed in
-- any, so nothing is read past the last one that was there while no ingest was on its way.
CREATE FUNCTION ci.read_sources(p_generation bigint, p_rows int DEFAULT 500) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_sweep ci.sweep; v_limit bigint; v_jobs bigint[]; v_again bigint[]; v_sources text[];
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  SELECT * INTO v_sweep FROM ci.sweep;
  WITH again AS (DELETE FROM ci.unread WHERE job_id = ANY (ARRAY(SELECT job_id FROM ci.unread LIMIT p_rows)) RETURNING job_id)
  SELECT coalesce(array_agg(job_id), '{}') INTO v_again FROM again;
  IF cardinality(v_again) = 0 AND v_sweep.read_to >= v_sweep.read_limit THEN
    PERFORM FROM ci.gate FOR UPDATE;                                                        -- lock: texts_gate
    SELECT coalesce(max(job_id), 0) INTO v_limit FROM ci.aterm;
    IF v_limit <= v_sweep.read_limit THEN RETURN 0; END IF;
    UPDATE ci.sweep SET read_limit = v_limit;
    RETURN 1;
  END IF;
  v_jobs := ARRAY(SELECT job_id FROM ci.aterm WHERE job_id > v_sweep.read_to AND job_id <= v_sweep.read_limit ORDER BY job_id LIMIT p_rows);
  WITH named AS MATERIALIZED (
         SELECT DISTINCT '/nix/store/' || m[1] AS path, a.job_id FROM ci.aterm a
         CROSS JOIN LATERAL regexp_matches(encode(a.text, 'escape'), '/nix/store/([0-9a-z]{32}-[0-9A-Za-z+._?=-]+)', 'g') m
         WHERE a.job_id = ANY (v_jobs || v_again)),
       new AS (INSERT INTO ci.job_source SELECT n.path, n.job_id FROM named n
               WHERE n.path NOT LIKE '%.drv' AND NOT EXISTS (SELECT FROM ci.output o WHERE o.path = n.path)
               ON CONFLICT DO NOTHING RETURNING path)
  SELECT array_agg(DISTINCT path) INTO v_sources FROM new;
  IF v_sources IS NOT NULL THEN PERFORM ci.spare(v_sources); END IF;                        -- fence: sources_spare
  UPDATE ci.sweep SET read_to = CASE WHEN cardinality(v_jobs) < p_rows THEN v_sweep.read_limit ELSE v_jobs[p_rows] END;
  RETURN greatest(cardinality(v_jobs) + cardinality(v_again), 1);
END $$;

-- The plan, in three passes in the order of paths, p_rows at a time. Answers where to go on; NULL: it is done.
-- First: what nobody makes and no text names, recorded longer ago than any upload takes. Three lists in the same order are compared.
CREATE FUNCTION ci.plan_candidates(p_generation bigint, p_after text, p_rows int, p_younger interval) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_last text; v_unneeded text[];
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  v_last := ci.end_of_page(p_after, p_rows);
  v_unneeded := ARRAY(
    SELECT c.path FROM ci.canonical c WHERE c.path > p_after AND c.path <= v_last
      AND NOT EXISTS (SELECT FROM ci.output o WHERE o.path = c.path AND o.path > p_after AND o.path <= v_last)
      AND NOT EXISTS (SELECT FROM ci.job_source s WHERE s.path = c.path AND s.path > p_after AND s.path <= v_last)   -- fence: source_is_kept
    );
  INSERT INTO ci.dying (path, recorded_at) SELECT c.path, c.recorded_at FROM ci.canonical c WHERE c.path = ANY (v_unneeded)
    AND c.recorded_at < ci.clock() - p_younger                                              -- fence: young_is_kept
  ON CONFLICT DO NOTHING;
  RETURN v_last;
END $$;

-- The last of p_rows records after a path.
CREATE FUNCTION ci.end_of_page(p_after text, p_rows bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT max(x.path) FROM (SELECT c.path FROM ci.canonical c WHERE c.path > p_after ORDER BY c.path LIMIT p_rows) x
$$;

-- Second: what a path that stays refers to stays. Each page looks at all marks once, and many small ones would do little else: a
-- page has five times as many records as there are marks, if that takes no more than some seconds.
CREATE FUNCTION ci.plan_references(p_generation bigint, p_after text, p_rows int) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_last text; v_named text[]; v_marks bigint;
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  SELECT count(*) INTO v_marks FROM ci.dying;
  IF v_marks = 0 THEN RETURN NULL; END IF;
  v_last := ci.end_of_page(p_after, greatest(p_rows, least(5 * v_marks, 1000000)));
  v_named := ARRAY(
    SELECT DISTINCT d.path FROM (
      SELECT unnest(c.refs) AS path FROM ci.canonical c WHERE c.path > p_after AND c.path <= v_last
        AND NOT EXISTS (SELECT FROM ci.dying d WHERE d.path = c.path AND d.path > p_after AND d.path <= v_last)) r
    JOIN ci.dying d ON d.path = r.path);
  IF cardinality(v_named) > 0 THEN PERFORM ci.spare(v_named); END IF;                       -- fence: referred_is_kept
  RETURN v_last;
END $$;

-- Third: what came to be made meanwhile stays; for the rest the grace begins. An ingest that began before the mark did not see
-- it: it is waited for.
CREATE FUNCTION ci.plan_confirm(p_generation bigint, p_after text, p_rows int) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_paths text[]; v_made text[];
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  PERFORM FROM ci.gate FOR UPDATE;                                                          -- lock: confirm_gate
  v_paths := ARRAY(SELECT path FROM ci.dying WHERE path > p_after AND since IS NULL ORDER BY path LIMIT p_rows);
  v_made := ARRAY(SELECT p FROM unnest(v_paths) p WHERE EXISTS (SELECT FROM ci.output o WHERE o.path = p));
  IF cardinality(v_made) > 0 THEN PERFORM ci.spare(v_made); END IF;                         -- fence: confirm_spares
  UPDATE ci.dying SET since = ci.clock() WHERE path = ANY (v_paths) AND since IS NULL;
  RETURN v_paths[cardinality(v_paths)];
END $$;

-- Some paths whose grace is over, those that others refer to last: record and mark go together. Those that are not in our bucket
-- have no size. No row: there is none left, or texts have to be read first.
CREATE FUNCTION ci.condemn(p_generation bigint, p_grace interval, p_rows int) RETURNS TABLE (path text, nar_hash bytea, attempt bigint, file_size bigint)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE v_ripe text[];
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  PERFORM FROM ci.gate FOR UPDATE;                                                          -- lock: condemn_gate
  IF EXISTS (SELECT FROM ci.unread) OR (SELECT max(job_id) FROM ci.aterm) > (SELECT read_to FROM ci.sweep) THEN RETURN; END IF;   -- fence: condemn_unread
  -- One that is being spared at this moment is not waited for.
  WITH ripe AS MATERIALIZED (SELECT d.path FROM ci.dying d WHERE d.since <= ci.clock() - p_grace
                             ORDER BY d.recorded_at DESC LIMIT p_rows FOR UPDATE SKIP LOCKED),   -- lock: condemn_skips_spared
       gone AS (DELETE FROM ci.dying WHERE path IN (SELECT path FROM ripe) RETURNING path)
  SELECT array_agg(path) INTO v_ripe FROM gone;
  RETURN QUERY
    WITH gone AS (DELETE FROM ci.canonical WHERE path = ANY (v_ripe) RETURNING *),
         named AS (INSERT INTO ci.condemned (path, nar_hash, attempt, file_size)
                   SELECT g.path, g.nar_hash, g.attempt, g.file_size FROM gone g WHERE g.file_hash IS NOT NULL
                   ON CONFLICT (path) DO UPDATE SET nar_hash = EXCLUDED.nar_hash, attempt = EXCLUDED.attempt, file_size = EXCLUDED.file_size, buried_at = NULL)
    SELECT g.path, g.nar_hash, g.attempt, g.file_size FROM gone g;
END $$;

-- Whose objects may still be there: of a sweep that broke off.
CREATE FUNCTION ci.unburied(p_generation bigint, p_rows int) RETURNS TABLE (path text, nar_hash bytea, attempt bigint, file_size bigint)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  RETURN QUERY SELECT c.path, c.nar_hash, c.attempt, c.file_size FROM ci.condemned c WHERE c.buried_at IS NULL ORDER BY c.path LIMIT p_rows;
END $$;

-- Their objects are gone.
CREATE FUNCTION ci.bury(p_generation bigint, p_paths text[]) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  UPDATE ci.condemned SET buried_at = ci.clock() WHERE path = ANY (p_paths);
  DELETE FROM ci.condemned WHERE buried_at < ci.clock() - ci.sweep_lease();
END $$;

-- What a plan would find now, in one look that changes nothing, and what earlier ones marked.
CREATE FUNCTION ci.would_sweep(p_younger interval, p_grace interval)
  RETURNS TABLE (path text, file_size bigint, ripe bool)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH RECURSIVE candidate AS MATERIALIZED (
         SELECT c.path, c.refs, c.file_size FROM ci.canonical c
         WHERE c.recorded_at < ci.clock() - p_younger AND NOT EXISTS (SELECT FROM ci.output o WHERE o.path = c.path)
           AND NOT EXISTS (SELECT FROM ci.job_source s WHERE s.path = c.path)),
       spared (path) AS (
         SELECT k.path FROM candidate k WHERE k.path IN (
           SELECT unnest(c.refs) FROM ci.canonical c WHERE NOT EXISTS (SELECT FROM candidate x WHERE x.path = c.path))
         UNION SELECT k.path FROM (SELECT unnest(c.refs) AS path FROM spared s JOIN candidate c ON c.path = s.path) r JOIN candidate k ON k.path = r.path)
  SELECT k.path, k.file_size, coalesce(d.since <= ci.clock() - p_grace, false)
  FROM candidate k LEFT JOIN ci.dying d ON d.path = k.path
  WHERE k.file_size IS NOT NULL AND NOT EXISTS (SELECT FROM spared s WHERE s.path = k.path)
$$;

-- What is marked and still there: how many objects, and their bytes.
CREATE FUNCTION ci.marked() RETURNS TABLE (paths bigint, bytes bigint)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT count(*), coalesce(sum(c.file_size), 0)::bigint FROM ci.dying d JOIN ci.canonical c ON c.path = d.path WHERE c.file_size IS NOT NULL
$$;

------------------------------------------------------------------------------------------------ what objects are for

-- What is known of paths by their hash parts: the NAR and the attempt on record, and whether a job makes the path.
CREATE FUNCTION ci.known_hashes(p_hashes text[]) RETURNS TABLE (hash text, path text, nar_hash bytea, attempt bigint, made bool)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  -- '.' is the character after '-'.
  SELECT h, c.path, c.nar_hash, c.attempt, EXISTS (SELECT FROM ci.output o WHERE o.path > '/nix/store/' || h || '-' AND o.path < '/nix/store/' || h || '.')
  FROM unnest(p_hashes) h LEFT JOIN ci.canonical c ON c.path > '/nix/store/' || h || '-' AND c.path < '/nix/store/' || h || '.'
$$;

-- Which of these derivations have a job.
CREATE FUNCTION ci.known_derivations(p_drv_paths text[]) RETURNS SETOF text
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.drv_path FROM ci.job j WHERE j.drv_path = ANY (p_drv_paths)
$$;

-- Which of these paths are on record.
CREATE FUNCTION ci.known_paths(p_paths text[]) RETURNS SETOF text
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT c.path FROM ci.canonical c WHERE c.path = ANY (p_paths)
$$;

------------------------------------------------------------------------------------------------ resync

-- A database that was restored from a backup under a bucket that went on: what it had marked and begun to remove is void. Nothing
-- is swept meanwhile.
CREATE FUNCTION ci.begin_resync(p_holder text) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_generation bigint := ci.begin_sweep(p_holder);
BEGIN
  IF v_generation IS NOT NULL THEN
    DELETE FROM ci.condemned;
    DELETE FROM ci.dying;
  END IF;
  RETURN v_generation;
END $$;

-- Which derivations of ours make these paths, as which output, and beside which others.
CREATE FUNCTION ci.makers(p_paths text[]) RETURNS TABLE (path text, drv_path text, output text, others text[])
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT o.path, j.drv_path, o.name, ARRAY(SELECT s.path FROM ci.output s WHERE s.job_id = o.job_id AND s.path <> o.path)
  FROM ci.output o JOIN ci.job j ON j.id = o.job_id
  WHERE o.path = ANY (p_paths) AND EXISTS (SELECT FROM ci.aterm a WHERE a.job_id = j.id)
$$;

-- The bucket has these, signed by us: that is what the paths are, whatever was recorded. Whoever makes them has nothing left to
-- do, also where it had failed by the time of the backup. Answers how many were news.
CREATE FUNCTION ci.adopt(p_generation bigint, p_paths text[], p_nar_hashes bytea[], p_nar_sizes bigint[], p_refs text[], p_file_hashes bytea[],
    p_file_sizes bigint[], p_cas text[], p_drv_paths text[]) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_count int; v_opened bigint[];
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  INSERT INTO ci.canonical AS c (path, nar_hash, nar_size, refs, file_hash, file_size, ca, job_id)
  SELECT u.path, u.nar_hash, u.nar_size, string_to_array(u.refs, ' '), u.file_hash, u.file_size, u.ca, j.id
  FROM unnest(p_paths, p_nar_hashes, p_nar_sizes, p_refs, p_file_hashes, p_file_sizes, p_cas, p_drv_paths)
       u (path, nar_hash, nar_size, refs, file_hash, file_size, ca, drv_path) LEFT JOIN ci.job j ON j.drv_path = u.drv_path ORDER BY u.path
  ON CONFLICT (path) DO UPDATE SET nar_hash = EXCLUDED.nar_hash, nar_size = EXCLUDED.nar_size, refs = EXCLUDED.refs, file_hash = EXCLUDED.file_hash,
    file_size = EXCLUDED.file_size, ca = EXCLUDED.ca, job_id = EXCLUDED.job_id, attempt = NULL, node_id = NULL, recorded_at = EXCLUDED.recorded_at
  WHERE (c.nar_hash, c.file_hash) IS DISTINCT FROM (EXCLUDED.nar_hash, EXCLUDED.file_hash);
  GET DIAGNOSTICS v_count = ROW_COUNT;
  WITH made AS MATERIALIZED (SELECT DISTINCT o.job_id FROM ci.output o WHERE o.path = ANY (p_paths)),
       twins AS (INSERT INTO ci.twin SELECT job_id FROM made ORDER BY 1 ON CONFLICT DO NOTHING)
  INSERT INTO ci.event (kind, subject) SELECT 'e', m.job_id FROM made m JOIN ci.job j ON j.id = m.job_id AND j.state = 'open';   -- event: adopted_ends_job
  SELECT array_agg(id) INTO v_opened FROM (
    SELECT j.id FROM ci.job j WHERE j.id IN (SELECT o.job_id FROM ci.output o WHERE o.path = ANY (p_paths)) AND j.state IN ('failed', 'cancelled')
      AND ci.wanted(j.id) AND NOT EXISTS (SELECT FROM ci.output o WHERE o.job_id = j.id AND NOT EXISTS (SELECT FROM ci.canonical c WHERE c.path = o.path))
    ORDER BY j.id FOR NO KEY UPDATE) x;                                                     -- lock: adopt_reopens
  IF v_opened IS NOT NULL THEN PERFORM ci.reopen(v_opened); END IF;
  RETURN v_count;
END $$;

-- Attempts begin after this one: their numbers name objects, and the bucket has those of attempts that the backup does not know.
CREATE FUNCTION ci.advance_attempts(p_generation bigint, p_attempt bigint) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_sweeper(p_generation);
  IF p_attempt > (SELECT last_value FROM ci.attempt_number) THEN PERFORM setval('ci.attempt_number', p_attempt); END IF;
END $$;

------------------------------------------------------------------------------------------------ how long it takes

-- When a build should be done, for ci.why, by the median of its name. Nothing is said of unknown names, and of what takes longer.
CREATE FUNCTION ci.time_left(p_job bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT coalesce((
    SELECT format(', done in about %s', CASE WHEN x.seconds < 90 THEN ceil(x.seconds) || ' s' ELSE round(x.seconds / 60) || ' minutes' END)
    FROM (SELECT (d.p50 - extract(epoch FROM ci.clock() - r.claimed_at))::numeric AS seconds
          FROM ci.running r JOIN ci.job j ON j.id = r.job_id JOIN ci.duration d ON d.name = ci.name_of(j.drv_path)
          WHERE r.job_id = p_job AND r.phase = 'building') x
    WHERE x.seconds > 0), '')
$$;

------------------------------------------------------------------------------------------------ rights

DO $$
DECLARE v_grant record; v_function regprocedure; v_setting text;
BEGIN
  FOR v_grant IN SELECT * FROM (VALUES
    ('harmonia_frontend', ARRAY['pin']),
    ('harmonia_signer', ARRAY['keep_published', 'begin_sweep', 'sweep_state', 'end_sweep', 'read_sources', 'plan_candidates', 'plan_references', 'plan_confirm', 'condemn', 'unburied',
                              'bury', 'would_sweep', 'marked', 'known_hashes', 'known_derivations', 'known_paths', 'begin_resync',
                              'makers', 'adopt', 'advance_attempts'])) x (role, names) LOOP
    EXECUTE (SELECT string_agg(format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::regprocedure, v_grant.role), '; ')
             FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname = ANY (v_grant.names));
  END LOOP;
  GRANT SELECT ON ci.sweep, ci.dying, ci.condemned TO harmonia_operator, harmonia_frontend;
  -- As in the migration before the last: a plan made on empty tables must not read full ones from end to end.
  FOR v_function IN SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'ci'::regnamespace AND p.proname IN
      ('keep_published', 'read_sources', 'plan_candidates', 'plan_confirm', 'condemn', 'known_hashes', 'known_derivations', 'known_paths',
       'makers', 'adopt') LOOP
    FOREACH v_setting IN ARRAY ARRAY['enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off',
                                     'plan_cache_mode = force_generic_plan'] LOOP
      EXECUTE format('ALTER FUNCTION %s SET %s', v_function, v_setting);
    END LOOP;
  END LOOP;
  -- The exceptions. Lists in the order of paths are merged, as indexes have them.
  ALTER FUNCTION ci.plan_candidates SET enable_mergejoin = on;
  ALTER FUNCTION ci.plan_candidates SET enable_nestloop = off;
  ALTER FUNCTION ci.plan_candidates SET enable_sort = off;
  -- A page names half a million paths: one look at all that is marked is cheaper than one probe for each.
  ALTER FUNCTION ci.plan_references SET enable_nestloop = off;
  ALTER FUNCTION ci.plan_references SET enable_mergejoin = off;
  ALTER FUNCTION ci.plan_references SET work_mem = '64MB';
END $$;
