-- Nodes and their sessions: register, heartbeat, deregister, drain. Called by builders under their pool's login.
--
-- A builder's transaction may stay open for as long as the builder likes (until the janitor ends it), so nothing that
-- builders call locks a row that the control plane must write: no lane, profile, class, project or resolver row, and
-- of jobs only those they hold. What follows from their calls is done by the resolver, through an event.
--
-- Errors that a caller can act on carry an SQLSTATE of class HC:
--   HC001 session unknown or ended   HC002 argument out of bounds   HC003 name taken     HC004 not allowed
--   HC005 not the leader             HC006 the graph is wrong       HC007 no such thing  HC008 not in this state
--   HC009 the graph is not known any more

CREATE FUNCTION ci.lease() RETURNS interval LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT interval '2 minutes' $$;

-- STABLE as convert_to is: declared immutable it would not be inlined, at 40 us a call.
CREATE FUNCTION ci.secret_hash(p_secret text) RETURNS bytea LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT sha256(convert_to(p_secret, 'UTF8')) $$;

CREATE FUNCTION ci.new_secret() RETURNS text LANGUAGE sql VOLATILE
  AS $$ SELECT replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '') $$;

-- A name without its version, as Nix splits it: what follows the first dash that no letter follows.
CREATE FUNCTION ci.name_of(p_drv_path text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
  AS $$ SELECT regexp_replace(left(substr(split_part(p_drv_path, '/', -1), 34), -4), '-[^A-Za-z].*$', '') $$;

CREATE FUNCTION ci.bytes_in_words(p_bytes bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_bytes >= 1 << 30 THEN trim_scale(round(p_bytes / 1073741824.0, 1)) || ' GiB' ELSE round(p_bytes / 1048576.0) || ' MiB' END
$$;

CREATE FUNCTION ci.refuse(p_state text, p_sentence text) RETURNS void LANGUAGE plpgsql
  AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = p_state, MESSAGE = p_sentence; END $$;

-- Systems that Nix builds on a node of these systems without being told to.
CREATE FUNCTION ci.with_extra_platforms(p_systems text[]) RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
  SELECT array_agg(DISTINCT s ORDER BY s) FROM (
    SELECT unnest(p_systems) AS s
    UNION ALL SELECT 'i686-linux' WHERE 'x86_64-linux' = ANY (p_systems)
    UNION ALL SELECT 'x86_64-v' || v || '-linux' FROM generate_series(1, 4) v WHERE 'x86_64-linux' = ANY (p_systems)) x
$$;

-- Can a node of these capabilities run the class?
CREATE FUNCTION ci.fits(p_systems text[], p_features text[], p_mandatory text[], p_memory bigint, c ci.class) RETURNS bool
  LANGUAGE sql IMMUTABLE AS $$
  SELECT true
     AND (c.system = 'builtin' OR c.system = ANY (p_systems))                               -- fence: fits_system
     AND c.features <@ p_features                -- every feature it requires               -- fence: fits_features
     AND p_mandatory <@ c.features               -- and it asks for what the node demands   -- fence: fits_mandatory
     AND (c.memory = 0 OR p_memory > c.memory)   -- and has not outgrown the node           -- fence: fits_memory
$$;

-- Could a node of the pool, if it had one?
CREATE FUNCTION ci.fits(p ci.pool, c ci.class) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT ci.fits(ci.with_extra_platforms(p.systems), p.features || p.mandatory_features, p.mandatory_features, p.memory, c)
$$;

-- Is the session who it says? The login is compared too: a stolen secret is of no use elsewhere.
CREATE FUNCTION ci.speaks(s ci.session, p_secret text) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT true
     AND s.secret_hash = ci.secret_hash(p_secret)                                           -- fence: session_secret
     AND s.login = session_user                                                             -- fence: session_login
     AND s.ended_at IS NULL                                                                 -- fence: session_ended
$$;

CREATE FUNCTION ci.own_session(p_session bigint, p_secret text) RETURNS SETOF ci.session LANGUAGE sql STABLE AS $$
  SELECT s.* FROM ci.session s WHERE s.id = p_session AND ci.speaks(s, p_secret)
$$;

CREATE FUNCTION ci.require_session(p_session bigint, p_secret text) RETURNS ci.session LANGUAGE plpgsql STABLE AS $$
DECLARE v_session ci.session;
BEGIN
  SELECT * INTO v_session FROM ci.own_session(p_session, p_secret);
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC001', format('session %s is unknown to this login or has ended: register again', p_session));
  END IF;
  RETURN v_session;
END $$;

CREATE FUNCTION ci.require_few(p_jobs bigint[]) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
  IF cardinality(p_jobs) > 4096 THEN PERFORM ci.refuse('HC002', 'a call names at most 4096 jobs'); END IF;
END $$;

-- Classes a profile may claim; again whenever a class or a pool is new.
CREATE FUNCTION ci.match_profiles() RETURNS void LANGUAGE sql AS $$
  UPDATE ci.profile p SET classes = m.classes
  FROM (SELECT p.id, coalesce(array_agg(c.id ORDER BY c.id) FILTER (WHERE c.id IS NOT NULL), '{}') AS classes
        FROM ci.profile p LEFT JOIN ci.class c ON ci.fits(p.systems, p.features, p.mandatory, p.memory, c) GROUP BY p.id) m
  WHERE m.id = p.id AND p.classes IS DISTINCT FROM m.classes
$$;

-- Pools that custom resources name, by their numbers; again whenever a pool is new. One that is not there yet is waited for.
CREATE FUNCTION ci.match_projects() RETURNS void LANGUAGE sql AS $$
  UPDATE ci.project p SET pools = m.pools, untrusted_pools = m.untrusted_pools
  FROM (SELECT q.id, CASE WHEN q.k8s_pools IS NOT NULL THEN ARRAY(SELECT o.id FROM ci.pool o WHERE o.name = ANY (q.k8s_pools) ORDER BY o.id) END AS pools,
               ARRAY(SELECT o.id FROM ci.pool o WHERE o.name = ANY (q.k8s_untrusted_pools) ORDER BY o.id) AS untrusted_pools
        FROM ci.project q WHERE q.k8s_uid IS NOT NULL) m
  WHERE m.id = p.id AND (p.pools, p.untrusted_pools) IS DISTINCT FROM (m.pools, m.untrusted_pools)
$$;

-- May this pool build what a project has in this tier?
CREATE FUNCTION ci.may_build(pr ci.project, p_tier smallint, p_pool int) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT true
     AND (p_tier <> 0 OR pr.pools IS NULL OR p_pool = ANY (pr.pools))                       -- fence: rank_pools
     AND (p_tier = 0 OR p_pool = ANY (pr.untrusted_pools))                                  -- fence: rank_untrusted_pools
$$;

-- And now?
CREATE FUNCTION ci.is_open(pr ci.project, p_tier smallint, p_pool int) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT pr.deleted_at IS NULL
     AND NOT pr.paused                                                                      -- fence: rank_paused
     AND ci.may_build(pr, p_tier, p_pool)
$$;

-- Writes every profile's turns: active lanes it may claim from, by manual priority, then used seconds per share of
-- the classes this node type can run (time on machines that it cannot use does not count here).
CREATE FUNCTION ci.rank() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  WITH mine AS (
    SELECT p.id AS profile_id, l.project_id, l.id AS lane_id, l.top, l.active, (l.used + l.inflight) / pr.shares AS ratio,
           1.0 / pr.shares AS weight, pr.max_concurrent AS most, t.all_active
    FROM ci.profile p
    JOIN ci.lane l ON l.class_id = ANY (p.classes)
    JOIN (SELECT o.project_id, count(*) AS all_active FROM ci.lane o WHERE o.active GROUP BY o.project_id) t ON t.project_id = l.project_id
    JOIN ci.project pr ON pr.id = l.project_id AND ci.is_open(pr, l.tier, p.pool_id)),
  turn AS (
    SELECT profile_id, project_id, sum(ratio) AS rank, min(weight) AS weight, max(top) FILTER (WHERE active) AS top,
           min(most) AS most, array_agg(lane_id ORDER BY lane_id) FILTER (WHERE active) AS lanes,
           count(*) FILTER (WHERE active) = min(all_active) AS whole
    FROM mine GROUP BY profile_id, project_id HAVING bool_or(active)),
  placed AS (
    SELECT *, sum(cardinality(lanes)) OVER w - cardinality(lanes) + 1 AS first FROM turn
    WINDOW w AS (PARTITION BY profile_id ORDER BY top DESC, rank, project_id)),
  flat AS (
    SELECT profile_id, array_agg(lane ORDER BY first, lane) AS lanes
    FROM placed, unnest(lanes) lane GROUP BY profile_id),
  row AS (
    SELECT profile_id, array_agg(project_id ORDER BY first) AS projects, array_agg(rank ORDER BY first) AS ranks,
           array_agg(weight::float8 ORDER BY first) AS weights, array_agg(top ORDER BY first) AS tops,
           array_agg(most ORDER BY first) AS limits,
           array_agg(whole ORDER BY first) AS whole, array_agg(first::int ORDER BY first) || (sum(cardinality(lanes)) + 1)::int AS firsts
    FROM placed GROUP BY profile_id)
  UPDATE ci.profile p
  SET projects = coalesce(r.projects, '{}'), ranks = coalesce(r.ranks, '{}'), weights = coalesce(r.weights, '{}'),
      tops = coalesce(r.tops, '{}'), limits = coalesce(r.limits, '{}'), whole = coalesce(r.whole, '{}'), firsts = coalesce(r.firsts, '{}'),
      lanes = coalesce(f.lanes, '{}')
  FROM ci.profile q LEFT JOIN row r ON r.profile_id = q.id LEFT JOIN flat f ON f.profile_id = q.id
  WHERE q.id = p.id AND (p.projects, p.ranks, p.tops, p.limits, p.whole, p.lanes, p.weights) IS DISTINCT FROM (coalesce(r.projects, '{}'),
    coalesce(r.ranks, '{}'), coalesce(r.tops, '{}'), coalesce(r.limits, '{}'), coalesce(r.whole, '{}'), coalesce(f.lanes, '{}'), coalesce(r.weights, '{}'));
END $$;

-- Lets go of everything a session holds, as interruptions. Accepted results stay: a signer completes them.
CREATE FUNCTION ci.release_session(p_session bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE v_jobs bigint[]; v_attempts bigint[];
BEGIN
  -- First, for it waits for a claim in flight, whose jobs are to be let go of too.
  UPDATE ci.session SET ended_at = ci.clock() WHERE id = p_session AND ended_at IS NULL;
  SELECT array_agg(job_id), array_agg(attempt) INTO v_jobs, v_attempts
  FROM ci.running WHERE session_id = p_session AND phase <> 'accepted';
  DELETE FROM ci.drain WHERE session_id = p_session;
  RETURN (SELECT count(*) FROM ci.interrupt(p_session, v_jobs, v_attempts, 'the builder went away'));
END $$;

-- A new life of a node. A former life that still holds its lease is released only on proof of the node's secret.
CREATE FUNCTION ci.register(p_node text, p_node_secret text, p_slots int, p_systems text[] DEFAULT NULL,
    p_features text[] DEFAULT NULL, p_kube_node text DEFAULT NULL, p_version text DEFAULT NULL)
  RETURNS TABLE (session_id bigint, secret text, slots int, systems text[], features text[])
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  v_pool ci.pool; v_node ci.node; v_before ci.session; v_profile int; v_id bigint;
  v_secret text := ci.new_secret();
  v_systems text[]; v_features text[]; v_slots int;
BEGIN
  SELECT * INTO v_pool FROM ci.pool p WHERE p.login = session_user AND p.deleted_at IS NULL;
  IF NOT FOUND THEN
    PERFORM ci.refuse('HC004', format('login %s belongs to no pool: builders register under their pool''s own login', session_user));
  END IF;
  IF coalesce(octet_length(p_node), 0) NOT BETWEEN 1 AND 253 OR coalesce(octet_length(p_node_secret), 0) NOT BETWEEN 16 AND 200
     OR cardinality(p_systems) > 32 OR cardinality(p_features) > 64 OR octet_length(p_kube_node) > 253 OR octet_length(p_version) > 100 THEN
    PERFORM ci.refuse('HC002', 'a node needs a name of 1 to 253 bytes and a secret of 16 to 200, and has at most 32 systems, 64 features, '
      '253 bytes of Kubernetes node and 100 of version');
  END IF;
  -- Never more than the pool's row says, whatever the node says.
  v_slots := least(greatest(coalesce(p_slots, 1), 1), v_pool.slots);
  SELECT coalesce(array_agg(s ORDER BY s), '{}') INTO v_systems
  FROM unnest(ci.with_extra_platforms(v_pool.systems)) s WHERE p_systems IS NULL OR s = ANY (ci.with_extra_platforms(p_systems));
  SELECT coalesce(array_agg(DISTINCT f ORDER BY f), '{}') INTO v_features
  FROM unnest(v_pool.features || v_pool.mandatory_features) f WHERE p_features IS NULL OR f = ANY (p_features);

  LOOP    -- again if the janitor has just removed it, as one that had not been there for long
    INSERT INTO ci.node (pool_id, name, secret_hash, kube_node)
    VALUES (v_pool.id, p_node, ci.secret_hash(p_node_secret), p_kube_node)
    ON CONFLICT (pool_id, name) DO NOTHING;
    SELECT * INTO v_node FROM ci.node n WHERE n.pool_id = v_pool.id AND n.name = p_node FOR UPDATE;    -- lock: register_node
    EXIT WHEN FOUND;
  END LOOP;
  SELECT * INTO v_before FROM ci.session s WHERE s.node_id = v_node.id AND s.ended_at IS NULL ORDER BY s.id DESC LIMIT 1;
  IF FOUND THEN
    IF v_node.secret_hash <> ci.secret_hash(p_node_secret)                                  -- fence: node_secret
       AND v_before.last_seen > ci.clock() - ci.lease()                                     -- fence: node_lease
    THEN
      PERFORM ci.refuse('HC003', format('node %s of pool %s is alive and this is not its secret: wait %s s for its lease or choose another name',
        p_node, v_pool.name, ceil(extract(epoch FROM v_before.last_seen + ci.lease() - ci.clock()))));
    END IF;
    PERFORM ci.release_session(v_before.id);
  END IF;
  UPDATE ci.node n SET secret_hash = ci.secret_hash(p_node_secret), kube_node = p_kube_node WHERE n.id = v_node.id;

  LOOP
    SELECT p.id INTO v_profile FROM ci.profile p WHERE p.pool_id = v_pool.id
      AND p.systems = v_systems AND p.features = v_features AND p.mandatory = v_pool.mandatory_features AND p.memory = v_pool.memory
    FOR KEY SHARE;                          -- as a session needs it, and no change of ranks minds   -- lock: register_profile
    EXIT WHEN FOUND;
    -- Every kind of node is matched with every class and ranked with all lanes: nobody may have them grow without end.
    IF (SELECT count(*) FROM ci.profile p WHERE p.pool_id = v_pool.id) >= 100 THEN
      PERFORM ci.refuse('HC002', format('pool %s knows 100 kinds of nodes, each with its own systems and features, which is the most: register with '
        'those of another node; a kind is forgotten a day after the last of its nodes went', v_pool.name));
    END IF;
    INSERT INTO ci.profile (pool_id, systems, features, mandatory, memory)
    VALUES (v_pool.id, v_systems, v_features, v_pool.mandatory_features, v_pool.memory)
    ON CONFLICT (pool_id, systems, features, mandatory, memory) DO NOTHING;
  END LOOP;
  INSERT INTO ci.session (node_id, profile_id, login, secret_hash, slots, version)
  VALUES (v_node.id, v_profile, session_user, ci.secret_hash(v_secret), v_slots, p_version) RETURNING id INTO v_id;
  INSERT INTO ci.event (kind, subject) VALUES ('p', v_profile);                             -- event: register_matches_profiles
  RETURN QUERY SELECT v_id, v_secret, v_slots, v_systems, v_features;
END $$;

-- Extends the leases of the session and of the builds it names; answers what a builder must know. A build that is not
-- named keeps its old lease: an answer to a claim that got lost frees its job by itself. p_stopping_in: SIGTERM came, the
-- process has so many seconds; this reason is the session's own and goes with it.
CREATE FUNCTION ci.heartbeat(p_session bigint, p_secret text, p_jobs bigint[], p_attempts bigint[], p_stopping_in float8 DEFAULT NULL)
  RETURNS TABLE (signers text[], drain_reasons text[], drain_seconds float8[], abandon bigint[], notice text)
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_session ci.session := ci.require_session(p_session, p_secret); v_now timestamptz := ci.clock();
BEGIN
  PERFORM ci.require_few(p_jobs);
  UPDATE ci.session s SET last_seen = v_now WHERE s.id = p_session;
  IF p_stopping_in IS NOT NULL THEN
    INSERT INTO ci.drain (node_id, session_id, reason, deadline)
    VALUES (v_session.node_id, p_session, 'SIGTERM', v_now + make_interval(secs => greatest(0, least(p_stopping_in, 31536000))))
    ON CONFLICT (node_id, session_id, reason) DO UPDATE SET deadline = EXCLUDED.deadline;
  END IF;
  -- It holds the session and waits for no build: whoever has one locked is ending it or will let go before the next beat.
  UPDATE ci.running r SET lease_until = v_now + ci.lease() WHERE r.job_id = ANY (ARRAY(
    SELECT q.job_id FROM unnest(p_jobs, p_attempts) u (job_id, attempt) JOIN ci.running q ON q.job_id = u.job_id
    WHERE q.attempt = u.attempt                                                             -- fence: heartbeat_attempt
      AND q.session_id = p_session                                                          -- fence: heartbeat_session
    FOR UPDATE OF q SKIP LOCKED));                                                          -- lock: heartbeat_skips
  RETURN QUERY SELECT
    ARRAY(SELECT r.url FROM ci.replica r WHERE r.role = 'signer' AND r.last_beat > v_now - interval '30 seconds' ORDER BY r.created_at),
    array_agg(d.reason ORDER BY d.deadline NULLS LAST), array_agg(extract(epoch FROM d.deadline - v_now)::float8 ORDER BY d.deadline NULLS LAST),
    ARRAY(SELECT u.job_id FROM unnest(p_jobs, p_attempts) u (job_id, attempt)
          WHERE NOT EXISTS (SELECT FROM ci.running r WHERE r.job_id = u.job_id AND r.attempt = u.attempt
                            AND r.session_id = p_session AND NOT r.cancelled)),
    CASE WHEN v_session.streak >= 3 THEN
      format('this node failed %s builds in a row for reasons of its own and claims no more until it registers anew', v_session.streak) END
  FROM ci.drain d WHERE d.node_id = v_session.node_id AND d.session_id IN (0, p_session);
END $$;

CREATE FUNCTION ci.deregister(p_session bigint, p_secret text) RETURNS int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM ci.require_session(p_session, p_secret);
  RETURN ci.release_session(p_session);
END $$;

-- Adds a reason or moves its deadline. Waits for a claim in flight of that node's session, so that nothing is claimed after it returns.
CREATE FUNCTION ci.drain(p_node int, p_reason text, p_deadline timestamptz DEFAULT NULL) RETURNS void
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM ci.node WHERE id = p_node) THEN
    PERFORM ci.refuse('HC007', format('there is no node %s', p_node));
  END IF;
  PERFORM FROM ci.session WHERE node_id = p_node AND ended_at IS NULL FOR UPDATE;           -- lock: drain_waits_for_claim
  INSERT INTO ci.drain (node_id, reason, deadline) VALUES (p_node, p_reason, p_deadline)
  ON CONFLICT (node_id, session_id, reason) DO UPDATE SET deadline = EXCLUDED.deadline;
END $$;

CREATE FUNCTION ci.resume(p_node int, p_reason text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.drain WHERE node_id = p_node AND session_id = 0 AND reason = p_reason;
  RETURN FOUND;
END $$;

-- Scale-in: of the named nodes, marks those that hold nothing, and only those, in one transaction.
CREATE FUNCTION ci.drain_idle(p_nodes int[], p_reason text) RETURNS SETOF int
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM FROM ci.session WHERE node_id = ANY (p_nodes) AND ended_at IS NULL ORDER BY id FOR UPDATE;   -- lock: drain_idle_waits_for_claim
  RETURN QUERY INSERT INTO ci.drain (node_id, reason)
    SELECT n, p_reason FROM unnest(p_nodes) n
    WHERE NOT EXISTS (SELECT FROM ci.session s JOIN ci.running r ON r.session_id = s.id WHERE s.node_id = n)
    ON CONFLICT (node_id, session_id, reason) DO UPDATE SET deadline = NULL
    RETURNING node_id;
END $$;
