-- What people and the operator change and ask: projects, pools, rebuild, cancel, why, and the lists of the pages.

-- People, or a custom resource through the operator, keep a project or a pool, never both.
CREATE FUNCTION ci.refuse_keeper(p_what text, p_kind text, p_name text, p_uid text) RETURNS void LANGUAGE sql AS $$
  SELECT ci.refuse('HC008', CASE WHEN p_uid IS NULL
    THEN format('%s %s is kept by the %s %s in namespace %s: change it there', p_what, p_name, p_kind, split_part(p_name, '/', 2), split_part(p_name, '/', 1))
    ELSE format('there is a %s %s that no %s keeps: remove it first, or choose another name', p_what, p_name, p_kind) END)
$$;

-- A project as wanted by people (p_uid is NULL) or by a custom resource. Of one resource the later generation stands; another of
-- its name takes over. NULL: a later word stands, nothing is changed.
CREATE FUNCTION ci.write_project(p_uid text, p_generation bigint, p_name text, p_shares int, p_max_concurrent int, p_pools text[],
    p_untrusted_pools text[], p_paused bool, p_retention interval) RETURNS int LANGUAGE plpgsql AS $$
DECLARE v_id int; v_before ci.project;
BEGIN
  PERFORM FROM ci.resolver FOR UPDATE;                                                      -- lock: project_resolver
  SELECT * INTO v_before FROM ci.project WHERE name = p_name;
  IF v_before.k8s_uid = p_uid THEN
    IF v_before.deleted_at IS NOT NULL THEN RETURN NULL; END IF;                            -- fence: mirror_removed_project
    IF v_before.k8s_generation > p_generation THEN RETURN NULL; END IF;                     -- fence: mirror_project_generation
  ELSIF v_before.id IS NOT NULL AND v_before.deleted_at IS NULL THEN
    IF (p_uid IS NULL) <> (v_before.k8s_uid IS NULL) THEN                                   -- fence: project_keeper
      PERFORM ci.refuse_keeper('project', 'Project', p_name, p_uid);
    END IF;
  END IF;
  INSERT INTO ci.project AS p (name, shares, max_concurrent, pools, untrusted_pools, paused, retention, k8s_uid, k8s_generation, k8s_pools, k8s_untrusted_pools)
  VALUES (p_name, p_shares, p_max_concurrent, CASE WHEN p_pools IS NOT NULL THEN ARRAY(SELECT id FROM ci.pool WHERE name = ANY (p_pools) ORDER BY id) END,
          ARRAY(SELECT id FROM ci.pool WHERE name = ANY (p_untrusted_pools) ORDER BY id), p_paused, p_retention, p_uid, p_generation,
          CASE WHEN p_uid IS NOT NULL THEN p_pools END, CASE WHEN p_uid IS NOT NULL THEN p_untrusted_pools END)
  ON CONFLICT (name) DO UPDATE SET shares = EXCLUDED.shares, max_concurrent = EXCLUDED.max_concurrent, pools = EXCLUDED.pools,
    untrusted_pools = EXCLUDED.untrusted_pools, paused = EXCLUDED.paused, retention = EXCLUDED.retention, deleted_at = NULL,
    k8s_uid = EXCLUDED.k8s_uid, k8s_generation = EXCLUDED.k8s_generation, k8s_pools = EXCLUDED.k8s_pools, k8s_untrusted_pools = EXCLUDED.k8s_untrusted_pools
  RETURNING id INTO v_id;
  -- Builds that run already count: they get permits too, beyond the limit, where no claim takes them again. Only this
  -- function makes permits, one caller a project at a time. What a builder keeps locked is not waited for.
  INSERT INTO ci.permit (project_id, n) SELECT v_id, g.n FROM generate_series(1, p_max_concurrent) g (n)
  WHERE NOT EXISTS (SELECT FROM ci.permit m WHERE m.project_id = v_id AND m.n = g.n);
  WITH bare AS (UPDATE ci.running r SET permit = true WHERE r.job_id = ANY (ARRAY(
                  SELECT u.job_id FROM ci.running u JOIN ci.lane l ON l.id = u.lane_id WHERE p_max_concurrent IS NOT NULL
                    AND l.project_id = v_id AND NOT u.permit FOR UPDATE OF u SKIP LOCKED)) RETURNING r.job_id)    -- lock: bare_skips
  INSERT INTO ci.permit (project_id, n, job_id)
  SELECT v_id, (SELECT coalesce(max(n), 0) FROM ci.permit WHERE project_id = v_id) + row_number() OVER (), job_id FROM bare;
  DELETE FROM ci.permit WHERE project_id = v_id AND n = ANY (ARRAY(
    SELECT m.n FROM ci.permit m WHERE m.project_id = v_id AND m.job_id IS NULL AND m.n > coalesce(p_max_concurrent, 0) FOR UPDATE SKIP LOCKED));    -- lock: permit_skips
  -- Not left to the resolver: a limit or a pause holds from now on.
  PERFORM ci.rank();
  RETURN v_id;
END $$;

CREATE FUNCTION ci.put_project(p_name text, p_shares int DEFAULT 100, p_max_concurrent int DEFAULT NULL, p_pools text[] DEFAULT NULL,
    p_untrusted_pools text[] DEFAULT '{}', p_paused bool DEFAULT false, p_retention interval DEFAULT '90 days') RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_unknown text;
BEGIN
  SELECT n INTO v_unknown FROM unnest(p_pools || p_untrusted_pools) n WHERE NOT EXISTS (SELECT FROM ci.pool WHERE name = n) LIMIT 1;
  IF FOUND THEN
    PERFORM ci.refuse('HC007', format('project %s names pool %s, which does not exist', p_name, v_unknown));
  END IF;
  RETURN ci.write_project(NULL, NULL, p_name, p_shares, p_max_concurrent, p_pools, p_untrusted_pools, p_paused, p_retention);
END $$;

-- As a Project says. False: a later word stands. A pool may come later: until then nothing of the project is built there.
CREATE FUNCTION ci.mirror_project(p_leader_generation bigint, p_uid text, p_generation bigint, p_name text, p_shares int, p_max_concurrent int,
    p_pools text[], p_untrusted_pools text[], p_paused bool, p_retention interval) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  RETURN ci.write_project(p_uid, p_generation, p_name, p_shares, p_max_concurrent, p_pools, p_untrusted_pools, p_paused, p_retention) IS NOT NULL;
END $$;

-- Its evaluations are cancelled, its history stays. What one of its name finds later is new to that one.
CREATE FUNCTION ci.end_project(p_uid text, p_name text) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE v_id int;
BEGIN
  UPDATE ci.project SET deleted_at = ci.clock() WHERE name = p_name AND deleted_at IS NULL
    AND k8s_uid IS NOT DISTINCT FROM p_uid                                                  -- fence: end_project_keeper
  RETURNING id INTO v_id;
  IF NOT FOUND THEN RETURN false; END IF;
  PERFORM ci.forget_branches(v_id);
  PERFORM ci.supersede(id, id, 'the project was removed') FROM ci.evaluation
  WHERE project_id = v_id AND state NOT IN ('aborted', 'cancelled');
  INSERT INTO ci.event (kind, subject) VALUES ('p', v_id);                                  -- event: removed_project_reranks
  RETURN true;
END $$;

CREATE FUNCTION ci.remove_project(p_name text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF ci.end_project(NULL, p_name) THEN RETURN true; END IF;
  IF EXISTS (SELECT FROM ci.project WHERE name = p_name AND deleted_at IS NULL) THEN
    PERFORM ci.refuse_keeper('project', 'Project', p_name, NULL);
  END IF;
  RETURN false;
END $$;

-- The Project is gone. False: another of its name has taken over, or there is none.
CREATE FUNCTION ci.unmirror_project(p_leader_generation bigint, p_uid text, p_name text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  RETURN ci.end_project(p_uid, p_name);
END $$;

-- A pool, likewise.
CREATE FUNCTION ci.write_pool(p_uid text, p_generation bigint, p_name text, p_login name, p_systems text[], p_features text[], p_mandatory text[],
    p_slots int, p_at_maximum bool, p_memory bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE v_id int;
BEGIN
  INSERT INTO ci.pool AS p (name, login, systems, features, mandatory_features, slots, at_maximum, memory, k8s_uid, k8s_generation)
  VALUES (p_name, p_login, p_systems, p_features, p_mandatory, p_slots, coalesce(p_at_maximum, false), p_memory, p_uid, p_generation)
  ON CONFLICT (name) DO UPDATE SET systems = EXCLUDED.systems, features = EXCLUDED.features, mandatory_features = EXCLUDED.mandatory_features,
    slots = EXCLUDED.slots, memory = EXCLUDED.memory, at_maximum = coalesce(p_at_maximum, p.at_maximum), deleted_at = NULL, k8s_uid = EXCLUDED.k8s_uid, k8s_generation = EXCLUDED.k8s_generation
  WHERE true
    AND (p.deleted_at IS NOT NULL OR (p.k8s_uid IS NULL) = (p_uid IS NULL))                 -- fence: pool_keeper
    AND (p.k8s_uid = p_uid AND p.deleted_at IS NOT NULL) IS NOT TRUE                        -- fence: mirror_removed_pool
    AND (p.k8s_uid = p_uid AND p.k8s_generation > p_generation) IS NOT TRUE                 -- fence: mirror_pool_generation
  RETURNING id INTO v_id;
  IF NOT FOUND THEN
    IF EXISTS (SELECT FROM ci.pool p WHERE p.name = p_name AND (p.k8s_uid IS NULL) <> (p_uid IS NULL)) THEN
      PERFORM ci.refuse_keeper('pool', 'BuilderPool', p_name, p_uid);
    END IF;
    RETURN NULL;
  END IF;
  -- A key, so apart: writing it would wait for every registration that a builder keeps open.
  UPDATE ci.pool SET login = p_login WHERE id = v_id AND login <> p_login;
  INSERT INTO ci.event (kind, subject) VALUES ('p', v_id);                                  -- event: pool_revives_unsupported
  RETURN v_id;
END $$;

CREATE FUNCTION ci.put_pool(p_name text, p_login name, p_systems text[], p_features text[] DEFAULT '{benchmark,big-parallel,nixos-test}',
    p_mandatory text[] DEFAULT '{}', p_slots int DEFAULT 1, p_at_maximum bool DEFAULT false, p_memory bigint DEFAULT 0) RETURNS int
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT ci.write_pool(NULL, NULL, p_name, p_login, p_systems, p_features, p_mandatory, p_slots, p_at_maximum, p_memory)
$$;

CREATE FUNCTION ci.mirror_pool(p_leader_generation bigint, p_uid text, p_generation bigint, p_name text, p_login name, p_systems text[],
    p_features text[], p_mandatory text[], p_slots int, p_memory bigint DEFAULT 0) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  RETURN ci.write_pool(p_uid, p_generation, p_name, p_login, p_systems, p_features, p_mandatory, p_slots, NULL, p_memory) IS NOT NULL;
END $$;

-- Whether a pool can have more nodes, and what keeps those from running that it should have: for who asks why nothing is built.
CREATE FUNCTION ci.note_pool(p_leader_generation bigint, p_uid text, p_name text, p_at_maximum bool, p_note text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  UPDATE ci.pool SET at_maximum = p_at_maximum, note = p_note WHERE name = p_name AND deleted_at IS NULL
    AND k8s_uid = p_uid;                                                                    -- fence: note_pool_keeper
  RETURN FOUND;
END $$;

CREATE FUNCTION ci.end_pool(p_uid text, p_name text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  UPDATE ci.pool SET deleted_at = ci.clock() WHERE name = p_name AND deleted_at IS NULL
    AND k8s_uid IS NOT DISTINCT FROM p_uid;                                                 -- fence: end_pool_keeper
  RETURN FOUND;
END $$;

CREATE FUNCTION ci.remove_pool(p_name text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF ci.end_pool(NULL, p_name) THEN RETURN true; END IF;
  IF EXISTS (SELECT FROM ci.pool WHERE name = p_name AND deleted_at IS NULL) THEN
    PERFORM ci.refuse_keeper('pool', 'BuilderPool', p_name, NULL);
  END IF;
  RETURN false;
END $$;

CREATE FUNCTION ci.unmirror_pool(p_leader_generation bigint, p_uid text, p_name text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_leader('operator', p_leader_generation);
  RETURN ci.end_pool(p_uid, p_name);
END $$;

-- What the status of every pool shows. queued: ready jobs that its nodes could claim, limits of projects aside. Ready jobs are
-- counted by the set of lanes that offer them, in one pass over at most 100,000 offers, whatever the number of pools.
CREATE FUNCTION ci.pool_counts() RETURNS TABLE (name text, uid text, nodes bigint, busy bigint, building bigint, uploading bigint, draining bigint, queued bigint)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH node AS (
    SELECT n.pool_id, count(r.job_id) AS held, count(r.job_id) FILTER (WHERE r.phase = 'building') AS building,
           EXISTS (SELECT FROM ci.drain d WHERE d.node_id = n.id AND d.session_id IN (0, s.id)) AS drains
    FROM ci.session s JOIN ci.node n ON n.id = s.node_id LEFT JOIN ci.running r ON r.session_id = s.id
    WHERE s.ended_at IS NULL GROUP BY n.id, s.id),
  waiting AS (
    SELECT x.lanes, count(*) AS jobs FROM (
      SELECT array_agg(o.lane_id ORDER BY o.lane_id) AS lanes FROM (SELECT job_id, lane_id FROM ci.offer LIMIT 100000) o GROUP BY o.job_id) x
    GROUP BY x.lanes),
  served AS (
    SELECT p.id, array_agg(l.id) AS lanes
    FROM ci.pool p
    JOIN ci.class c ON ci.fits(p, c)
    JOIN ci.lane l ON l.class_id = c.id
    JOIN ci.project pr ON pr.id = l.project_id AND ci.is_open(pr, l.tier, p.id)
    WHERE p.deleted_at IS NULL GROUP BY p.id)
  SELECT p.name, p.k8s_uid, count(n.pool_id), count(*) FILTER (WHERE n.held > 0), coalesce(sum(n.building), 0)::bigint, coalesce(sum(n.held - n.building), 0)::bigint,
         count(*) FILTER (WHERE n.drains),
         coalesce((SELECT sum(w.jobs) FROM waiting w, served s WHERE s.id = p.id AND w.lanes && s.lanes), 0)::bigint
  FROM ci.pool p LEFT JOIN node n ON n.pool_id = p.id WHERE p.deleted_at IS NULL GROUP BY p.id ORDER BY p.name
$$;

-- Ready jobs by the pools that could take them: for each pool, how many of its features they do not ask for, and how many of the
-- others have less memory than it; and how many of them their projects' limits let run. In one pass over at most 100,000 offers, whatever the number of pools.
CREATE FUNCTION ci.demand() RETURNS TABLE (pools text[], surplus int[], jobs bigint)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH crowd AS (
    SELECT x.lanes, count(*) AS jobs FROM (
      SELECT array_agg(o.lane_id ORDER BY o.lane_id) AS lanes FROM (SELECT job_id, lane_id FROM ci.offer LIMIT 100000) o GROUP BY o.job_id) x
    GROUP BY x.lanes),
  room AS (
    SELECT p.id, p.max_concurrent - (SELECT count(*) FROM ci.permit m WHERE m.project_id = p.id AND m.job_id IS NOT NULL) AS jobs FROM ci.project p),
  kind AS (
    SELECT c.lanes, c.jobs, min(l.class_id) AS class_id, array_agg(l.project_id ORDER BY l.project_id) AS projects,
           CASE WHEN bool_and(r.jobs IS NOT NULL) THEN sum(r.jobs) END AS room
    FROM crowd c, unnest(c.lanes) x JOIN ci.lane l ON l.id = x JOIN room r ON r.id = l.project_id GROUP BY c.lanes, c.jobs),
  -- What is in front of it in the same projects takes its part of the room.
  bounded AS (
    SELECT k.lanes, k.class_id, least(k.jobs, CASE WHEN k.room IS NOT NULL THEN greatest(0, k.room - sum(k.jobs) OVER w + k.jobs) END) AS jobs
    FROM kind k WINDOW w AS (PARTITION BY k.projects ORDER BY k.class_id, k.lanes)),
  fit AS (
    SELECT b.lanes, b.jobs, p.name, cardinality(p.features || p.mandatory_features) - cardinality(c.features)
             + rank() OVER (PARTITION BY b.lanes ORDER BY p.memory)::int - 1 AS surplus
    FROM bounded b JOIN ci.class c ON c.id = b.class_id
    JOIN ci.pool p ON p.deleted_at IS NULL AND ci.fits(p, c)
    WHERE b.jobs > 0 AND EXISTS (SELECT FROM unnest(b.lanes) x JOIN ci.lane l ON l.id = x JOIN ci.project pr ON pr.id = l.project_id AND ci.is_open(pr, l.tier, p.id)))
  SELECT y.pools, y.surplus, sum(y.jobs)::bigint FROM (
    SELECT array_agg(f.name ORDER BY f.name) AS pools, array_agg(f.surplus ORDER BY f.name) AS surplus, f.jobs FROM fit f GROUP BY f.lanes, f.jobs) y
  GROUP BY y.pools, y.surplus ORDER BY y.pools, y.surplus
$$;

-- What the status of every project that a custom resource keeps shows. used_share: of all builder time that still counts.
CREATE FUNCTION ci.project_counts() RETURNS TABLE (name text, uid text, queued bigint, running bigint, used_share float8, missing_pools text[],
    evaluation bigint, commit_id text, status text, created_at text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH used AS (SELECT l.project_id, sum(l.used + l.inflight) AS seconds FROM ci.lane l GROUP BY l.project_id),
  running AS (SELECT l.project_id, count(*) AS builds FROM ci.running r JOIN ci.lane l ON l.id = r.lane_id GROUP BY l.project_id)
  SELECT p.name, p.k8s_uid, (SELECT count(*) FROM (SELECT FROM ci.offer o WHERE o.project_id = p.id LIMIT 100000) x), coalesce(r.builds, 0),
    coalesce(u.seconds / nullif((SELECT sum(a.seconds) FROM used a), 0), 0),
    ARRAY(SELECT DISTINCT n FROM unnest(p.k8s_pools || p.k8s_untrusted_pools) n
          WHERE NOT EXISTS (SELECT FROM ci.pool o WHERE o.name = n AND o.deleted_at IS NULL) ORDER BY n),
    e.id, e.commit_id, CASE WHEN e.state <> 'complete' THEN CASE e.state WHEN 'aborted' THEN 'failed' ELSE e.state::text END
      ELSE (SELECT CASE WHEN bool_or(j.state = 'open') THEN 'building'
                        WHEN bool_or(a.error IS NOT NULL OR j.state IN ('failed', 'dep_failed', 'cancelled')) THEN 'failed' ELSE 'succeeded' END
            FROM ci.evaluation_attr a LEFT JOIN ci.job j ON j.id = a.job_id WHERE a.evaluation_id = e.id) END,
    ci.moment(e.created_at)
  FROM ci.project p LEFT JOIN used u ON u.project_id = p.id LEFT JOIN running r ON r.project_id = p.id
  LEFT JOIN LATERAL (SELECT * FROM ci.evaluation e WHERE e.project_id = p.id ORDER BY e.id DESC LIMIT 1) e ON true
  WHERE p.k8s_uid IS NOT NULL AND p.deleted_at IS NULL ORDER BY p.name
$$;

-- Once more, first in line. Only the named build gets the priority; what failed because of it follows at its own.
CREATE FUNCTION ci.rebuild(p_job bigint) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_job ci.job;
BEGIN
  SELECT * INTO v_job FROM ci.job WHERE id = p_job FOR NO KEY UPDATE;                       -- lock: rebuild_job
  IF NOT FOUND THEN PERFORM ci.refuse('HC007', format('there is no build %s', p_job)); END IF;
  IF v_job.state = 'dep_failed' THEN
    PERFORM ci.refuse('HC008', format('build %s did not fail itself: rebuild %s, which it depends on', p_job, v_job.root));
  ELSIF v_job.state NOT IN ('failed', 'cancelled') THEN
    RETURN false;
  ELSIF NOT ci.wanted(p_job) THEN
    PERFORM ci.refuse('HC008', format('no live evaluation wants build %s any more: evaluate again', p_job));
  END IF;
  PERFORM ci.reopen(ARRAY[p_job], 100::smallint);
  RETURN true;
END $$;

-- All that failed of an evaluation, as if each were rebuilt. What depends on it follows. Answers how many.
CREATE FUNCTION ci.rebuild_failed(p_evaluation bigint) RETURNS bigint
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_jobs bigint[];
BEGIN
  IF NOT EXISTS (SELECT FROM ci.evaluation WHERE id = p_evaluation) THEN
    PERFORM ci.refuse('HC007', format('there is no evaluation %s', p_evaluation));
  ELSIF NOT EXISTS (SELECT FROM ci.evaluation WHERE id = p_evaluation AND state IN ('evaluating', 'complete')) THEN
    PERFORM ci.refuse('HC008', format('evaluation %s has ended: evaluate again', p_evaluation));
  END IF;
  SELECT array_agg(id) INTO v_jobs FROM (SELECT j.id FROM ci.want w JOIN ci.job j ON j.id = w.job_id
    WHERE w.evaluation_id = p_evaluation AND j.state IN ('failed', 'cancelled') ORDER BY j.id FOR NO KEY UPDATE OF j) x;    -- lock: rebuild_failed
  IF v_jobs IS NULL THEN RETURN 0; END IF;
  PERFORM ci.reopen(v_jobs, 100::smallint);
  RETURN cardinality(v_jobs);
END $$;

-- How far a job is, in one word.
CREATE FUNCTION ci.state_of(j ci.job) RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT CASE WHEN j.state <> 'open' THEN j.state::text ELSE coalesce(
    (SELECT CASE r.phase WHEN 'accepted' THEN 'publishing' ELSE r.phase::text END FROM ci.running r WHERE r.job_id = j.id),
    (SELECT 'ready' FROM ci.ready r WHERE r.job_id = j.id), CASE WHEN j.id IS NOT NULL THEN 'blocked' END) END
$$;

-- A person's no to one build. If it runs, its builder hears of it with the next heartbeat.
CREATE FUNCTION ci.cancel(p_job bigint) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  -- A builder may keep its row locked: waited for before the resolver's lock is taken, never under it.
  UPDATE ci.running SET cancelled = true, refused = (SELECT max(id) FROM ci.evaluation) WHERE job_id = p_job AND phase <> 'accepted';
  IF FOUND THEN RETURN true; END IF;
  PERFORM FROM ci.resolver FOR UPDATE;                                                      -- lock: cancel_resolver
  IF EXISTS (SELECT FROM ci.retire(ARRAY[p_job], 'cancelled', NULL, 'cancelled by hand')) THEN RETURN true; END IF;
  UPDATE ci.running SET cancelled = true, refused = (SELECT max(id) FROM ci.evaluation) WHERE job_id = ANY (ARRAY(
    SELECT r.job_id FROM ci.running r WHERE r.job_id = p_job AND r.phase <> 'accepted' FOR UPDATE SKIP LOCKED));    -- lock: cancel_skips_held
  IF NOT FOUND AND EXISTS (SELECT FROM ci.job j WHERE j.id = p_job AND j.state = 'open')
     AND NOT EXISTS (SELECT FROM ci.running r WHERE r.job_id = p_job AND r.phase = 'accepted') THEN
    PERFORM ci.refuse('HC008', format('build %s is changing hands at this moment: try again', p_job));
  END IF;
  RETURN FOUND;
END $$;

-- Why a job is not running, in sentences, most telling first. One row at least.
CREATE FUNCTION ci.why(p_job bigint) RETURNS TABLE (code text, sentence text)
  LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE j ci.job; c ci.class; b ci.blocked; v_ready ci.ready; w ci.job; v_ahead bigint; v_text text; v_now timestamptz := ci.clock(); n record;
BEGIN
  SELECT * INTO j FROM ci.job WHERE id = p_job;
  IF NOT FOUND THEN PERFORM ci.refuse('HC007', format('there is no build %s', p_job)); END IF;
  SELECT * INTO c FROM ci.class WHERE id = j.class_id;
  IF j.state <> 'open' THEN
    SELECT * INTO w FROM ci.job WHERE id = j.root;
    RETURN QUERY SELECT j.state::text, CASE j.state
      WHEN 'cached' THEN 'A substituter has it: there is nothing to build.'
      WHEN 'succeeded' THEN format('It was built; it ended at %s.', to_char(j.ended_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI "UTC"'))
      WHEN 'dep_failed' THEN format('It depends on %s (build %s), which %s.', w.drv_path, w.id, CASE w.state WHEN 'cancelled' THEN 'was cancelled' ELSE 'failed' END)
      ELSE format('It %s: %s.', CASE j.state WHEN 'failed' THEN 'failed' ELSE 'was cancelled' END, coalesce(j.error, 'no reason is known')) END;
    RETURN;
  END IF;
  SELECT r.phase, r.cancelled, d.name, r.claimed_at INTO n FROM ci.running r JOIN ci.session s ON s.id = r.session_id JOIN ci.node d ON d.id = s.node_id WHERE r.job_id = p_job;
  IF FOUND THEN
    RETURN QUERY SELECT n.phase::text, format('It is %s on %s, %s s after it was claimed%s%s.',
      CASE n.phase WHEN 'building' THEN 'building' WHEN 'uploading' THEN 'uploading its outputs' ELSE 'being published' END,
      n.name, floor(extract(epoch FROM v_now - n.claimed_at)), ci.time_left(p_job), CASE WHEN n.cancelled THEN ', and will be stopped' ELSE '' END);
    RETURN;
  END IF;
  SELECT * INTO b FROM ci.blocked WHERE job_id = p_job;
  IF FOUND THEN
    IF b.run_at > v_now THEN
      RETURN QUERY SELECT 'retry', format('Attempt %s failed (%s); the next is due at %s.', j.retries, coalesce(j.error, j.failure), to_char(b.run_at AT TIME ZONE 'UTC', 'HH24:MI:SS "UTC"'));
    END IF;
    RETURN QUERY SELECT 'missing', format('Its input %s could not be fetched; a signer will look for it.', m.path) FROM ci.missing m WHERE m.job_id = p_job;
    RETURN QUERY SELECT 'blocked', format('It waits for %s inputs; the deepest is %s (build %s), which is %s.', x.n, y.drv_path, y.id, CASE
        WHEN r.job_id IS NOT NULL THEN r.phase || ' on ' || d.name || ' for ' || floor(extract(epoch FROM v_now - r.claimed_at)) || ' s' || ci.time_left(y.id)
        WHEN k.job_id IS NOT NULL THEN 'ready to be claimed' ELSE 'waiting itself' END)
      FROM (SELECT count(*) AS n FROM ci.job_input i JOIN ci.job q ON q.id = i.input WHERE i.referrer = p_job AND q.state = 'open') x,
           ci.job y LEFT JOIN ci.running r ON r.job_id = y.id LEFT JOIN ci.session s ON s.id = r.session_id LEFT JOIN ci.node d ON d.id = s.node_id
           LEFT JOIN ci.ready k ON k.job_id = y.id
      WHERE y.id = b.watch AND y.state = 'open';
    IF NOT FOUND AND (b.run_at > v_now) IS NOT TRUE AND NOT EXISTS (SELECT FROM ci.missing m WHERE m.job_id = p_job) THEN
      RETURN QUERY SELECT 'resolving', 'It is about to be looked at by the resolver.';
    END IF;
    RETURN;
  END IF;

  -- Ready: who could take it?
  SELECT * INTO v_ready FROM ci.ready WHERE job_id = p_job;
  SELECT count(*) FILTER (WHERE ci.fits(p, c)) AS fit,
         count(*) FILTER (WHERE c.system = 'builtin' OR c.system = ANY (ci.with_extra_platforms(p.systems))) AS same_system,
         bool_and(p.at_maximum) FILTER (WHERE ci.fits(p, c)) AS full_up
  INTO n FROM ci.pool p WHERE p.deleted_at IS NULL;
  IF n.fit = 0 THEN
    RETURN QUERY SELECT 'unsupported', ci.what_is_missing(c) || format(' It fails %s after the last one was seen, at %s.', '30 minutes',
      to_char((c.last_capable + interval '30 minutes') AT TIME ZONE 'UTC', 'HH24:MI "UTC"'));
    RETURN;
  END IF;
  IF c.memory > 0 THEN
    RETURN QUERY SELECT 'memory', format('It ran out of memory where there are %s: only a pool with more may take it.', ci.bytes_in_words(c.memory));
  END IF;
  RETURN QUERY SELECT 'paused', format('Project %s is paused.', p.name) FROM ci.offer o JOIN ci.lane l ON l.id = o.lane_id JOIN ci.project p ON p.id = l.project_id
    WHERE o.job_id = p_job AND p.paused;
  RETURN QUERY SELECT 'limit', format('Project %s has %s builds running, which is its limit.', p.name, p.max_concurrent)
    FROM ci.offer o JOIN ci.lane l ON l.id = o.lane_id JOIN ci.project p ON p.id = l.project_id
    WHERE o.job_id = p_job AND p.max_concurrent IS NOT NULL AND (SELECT count(*) FROM ci.permit m WHERE m.project_id = p.id AND m.job_id IS NOT NULL) >= p.max_concurrent;
  RETURN QUERY SELECT 'pools', format('Project %s may build this only in pools that cannot run it.', p.name)
    FROM ci.offer o JOIN ci.lane l ON l.id = o.lane_id JOIN ci.project p ON p.id = l.project_id
    WHERE o.job_id = p_job AND NOT EXISTS (SELECT FROM ci.pool q WHERE q.deleted_at IS NULL
      AND ci.fits(q, c)
      AND ci.may_build(p, l.tier, q.id));
  RETURN QUERY SELECT 'draining', format('Node %s could take it but drains (%s).', d.name, string_agg(x.reason, ', '))
    FROM ci.session s JOIN ci.profile p ON p.id = s.profile_id JOIN ci.node d ON d.id = s.node_id JOIN ci.drain x ON x.node_id = d.id AND x.session_id IN (0, s.id)
    WHERE s.ended_at IS NULL AND s.last_seen > v_now - ci.lease() AND j.class_id = ANY (p.classes) GROUP BY d.name;
  RETURN QUERY SELECT 'uploads', format('Node %s could take it but has %s uploads waiting.', d.name, count(*))
    FROM ci.session s JOIN ci.profile p ON p.id = s.profile_id JOIN ci.node d ON d.id = s.node_id JOIN ci.running r ON r.session_id = s.id AND r.phase = 'uploading'
    WHERE s.ended_at IS NULL AND j.class_id = ANY (p.classes) GROUP BY d.name, s.slots HAVING count(*) > 2 * s.slots;
  RETURN QUERY SELECT 'pending', format('Pool %s should have more nodes: %s.', p.name, p.note) FROM ci.pool p
    WHERE p.deleted_at IS NULL AND p.note IS NOT NULL AND ci.fits(p, c);
  IF NOT ci.other_node(p_job, j.class_id, 0) THEN
    RETURN QUERY SELECT 'no_node', CASE WHEN n.full_up THEN 'Every pool that can run it is at its maximum and has no node that would claim it.'
      ELSE 'No node that can run it claims at the moment; a pool that can exists.' END;
  END IF;
  IF v_ready.avoid IS NOT NULL THEN
    RETURN QUERY SELECT 'avoid', format('It failed on node %s and waits for another.', (SELECT d.name FROM ci.node d WHERE d.id = v_ready.avoid));
  END IF;
  FOR n IN SELECT o.*, p.name, (l.used + l.inflight) / p.shares AS ratio, p.shares FROM ci.offer o JOIN ci.lane l ON l.id = o.lane_id JOIN ci.project p ON p.id = l.project_id WHERE o.job_id = p_job LOOP
    SELECT count(*) INTO v_ahead FROM (SELECT FROM ci.offer o WHERE o.lane_id = n.lane_id
      AND (o.urgency, o.evaluation_id, o.shortness, o.job_id) < (n.urgency, n.evaluation_id, n.shortness, n.job_id) LIMIT 10000) x;
    RETURN QUERY SELECT 'order', format('It is number %s in the line of project %s, which has used %s s of builder time per share (%s shares).',
      v_ahead + 1, n.name, round(n.ratio::numeric, 1), n.shares);
  END LOOP;
END $$;

CREATE FUNCTION ci.what_is_missing(c ci.class) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN c.system <> 'builtin' AND NOT EXISTS (SELECT FROM ci.pool p WHERE p.deleted_at IS NULL AND c.system = ANY (ci.with_extra_platforms(p.systems)))
      THEN format('No pool or node builds for %s.', c.system)
    WHEN c.memory > 0 AND EXISTS (SELECT FROM ci.pool p WHERE p.deleted_at IS NULL
        AND ci.fits(ci.with_extra_platforms(p.systems), p.features || p.mandatory_features, p.mandatory_features, c.memory + 1, c))
      THEN format('No pool or node for %s has more than the %s of memory that it ran out of.', c.system, ci.bytes_in_words(c.memory))
    ELSE format('No pool or node for %s offers %s.', c.system, coalesce((
      SELECT 'the feature ' || string_agg(f, ', ') FROM unnest(c.features) f WHERE NOT EXISTS (
        SELECT FROM ci.pool p WHERE p.deleted_at IS NULL AND c.system = ANY (ci.with_extra_platforms(p.systems)) AND f = ANY (p.features || p.mandatory_features))),
      'the features ' || array_to_string(c.features, ', ') || ' together')) END
$$;

-- A secret for the API or the cache, shown this once.
CREATE FUNCTION ci.create_token(p_name text, p_scope text, p_expires_in interval DEFAULT NULL) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_secret text := ci.new_secret();
BEGIN
  IF p_scope NOT IN ('read', 'operate', 'admin') THEN
    PERFORM ci.refuse('HC002', format('there is no scope %s: read, operate and admin are', p_scope));
  END IF;
  -- One that has expired allows nothing, and whose it was may not be shown it any more.
  DELETE FROM ci.token WHERE name = p_name AND expires_at <= ci.clock();
  INSERT INTO ci.token (name, scope, secret_hash, expires_at) VALUES (p_name, p_scope, ci.secret_hash(v_secret), ci.clock() + p_expires_in)
  ON CONFLICT (name) DO NOTHING;
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC008', format('there is a token %s already: revoke it first, or take another name', p_name));
  END IF;
  RETURN v_secret;
END $$;

CREATE FUNCTION ci.revoke_token(p_name text) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.token WHERE name = p_name;
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC007', format('there is no token %s', p_name));
  END IF;
END $$;

-- What a secret allows; no row: nothing.
CREATE FUNCTION ci.token_scope(p_secret text) RETURNS TABLE (name text, scope text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT t.name, t.scope FROM ci.token t
  WHERE t.secret_hash = ci.secret_hash(p_secret)                                            -- fence: token_secret
    AND (t.expires_at > ci.clock()) IS NOT FALSE                                            -- fence: token_expired
$$;
