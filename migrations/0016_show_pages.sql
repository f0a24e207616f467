-- What the web pages ask, and how they know who asks.

-- How many attempts ended lately. They are written in the order of their ends: it is enough to know of every few pages of the
-- table when those ended that are on them, and a finished build pays next to nothing for it.
CREATE INDEX attempt_ended ON ci.attempt USING brin (ended_at) WITH (pages_per_range = 16, autosummarize = on);

-- One row: what the cookies of all frontends are signed with. Another secret here signs everybody out.
CREATE TABLE ci.web_key (
  id     int PRIMARY KEY CHECK (id = 1),
  secret text NOT NULL
);
INSERT INTO ci.web_key VALUES (1, ci.new_secret());

CREATE FUNCTION ci.web_key() RETURNS text
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT secret FROM ci.web_key $$;

-- Which token a secret is, for a cookie that stands for it.
CREATE FUNCTION ci.token_of(p_secret text) RETURNS TABLE (id int, name text, scope text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT t.id, s.name, s.scope FROM ci.token_scope(p_secret) s JOIN ci.token t ON t.name = s.name
$$;

-- What the token of a cookie allows now. No row: it was revoked or has expired.
CREATE FUNCTION ci.token_now(p_id int) RETURNS TABLE (name text, scope text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT t.name, t.scope FROM ci.token t WHERE t.id = p_id AND (t.expires_at > ci.clock()) IS NOT FALSE    -- fence: cookie_token_expired
$$;

-- A way in that works once, for whoever owns the farm: `harmonia-ci up` prints it.
CREATE TABLE ci.invitation (
  secret_hash bytea PRIMARY KEY,
  scope       text NOT NULL CHECK (scope IN ('read', 'operate', 'admin')),
  expires_at  timestamptz NOT NULL
);

CREATE FUNCTION ci.invite(p_scope text, p_within interval) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_secret text := ci.new_secret();
BEGIN
  DELETE FROM ci.invitation WHERE expires_at <= ci.clock();
  INSERT INTO ci.invitation VALUES (ci.secret_hash(v_secret), p_scope, ci.clock() + p_within);
  RETURN v_secret;
END $$;

-- Takes it, so that nobody takes it again. No row: somebody has, or it is too late.
CREATE FUNCTION ci.accept_invitation(p_secret text) RETURNS TABLE (scope text)
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  DELETE FROM ci.invitation i WHERE i.secret_hash = ci.secret_hash(p_secret)
    AND i.expires_at > ci.clock()                                                           -- fence: invitation_expired
  RETURNING i.scope
$$;

-- What may have changed for whoever looks, in three numbers: what runs, the nodes, the evaluations. Asked once a second by a
-- frontend that has readers, and only small tables are read: what ends or becomes ready is heard of otherwise.
CREATE FUNCTION ci.pulse() RETURNS TABLE (running bigint, nodes bigint, evaluations bigint)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT (SELECT bit_xor(hashtextextended(r.phase::text || r.cancelled, r.attempt)) FROM ci.running r),
    (SELECT bit_xor(x.h) FROM (
       SELECT hashtextextended(s.slots::text, s.id) AS h FROM ci.session s WHERE s.ended_at IS NULL
       UNION ALL SELECT hashtextextended(d.reason || coalesce(d.deadline::text, ''), d.node_id) FROM ci.drain d) x),
    (SELECT bit_xor(x.h) FROM (
       SELECT hashtextextended(e.state::text, e.id) AS h FROM ci.evaluation e WHERE e.state IN ('queued', 'evaluating')
       UNION ALL SELECT max(e.id) FROM ci.evaluation e
       UNION ALL SELECT hashtextextended(format('%s %s %s', p.shares, p.paused, p.deleted_at), p.id) FROM ci.project p) x)
$$;

REVOKE ALL ON FUNCTION ci.web_key, ci.token_of, ci.token_now, ci.invite, ci.accept_invitation, ci.pulse FROM PUBLIC;
GRANT EXECUTE ON FUNCTION ci.web_key, ci.token_of, ci.token_now, ci.accept_invitation, ci.pulse TO harmonia_frontend;
