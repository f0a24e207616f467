-- Outside pull requests whose forge is told that they wait, and tokens of people whom forges know.

-- A commit that waits for consent is in the outbox without an evaluation: there is none yet.
ALTER TABLE ci.report ALTER evaluation_id DROP NOT NULL;

-- Its forge shall hear that it waits. Not where an evaluation speaks for it already.
CREATE FUNCTION ci.wait_for_consent(p_project int, p_commit text) RETURNS void
  LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO ci.report (project_id, commit_id, next_at)
  SELECT s.project_id, p_commit, ci.clock() FROM ci.project_source s WHERE s.project_id = p_project AND ci.instance_of(s) IS NOT NULL
  ON CONFLICT DO NOTHING $$;

-- The head of a pull request is about to be another, or none: nobody waits for that one any more. Evaluations take theirs with them.
CREATE FUNCTION ci.forget_wait() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.report WHERE project_id = OLD.project_id AND commit_id = OLD.commit_id AND evaluation_id IS NULL;
  RETURN NULL;
END $$;
CREATE TRIGGER forget_wait AFTER UPDATE OF commit_id OR DELETE ON ci.pull_request FOR EACH ROW EXECUTE FUNCTION ci.forget_wait();

-- A token may be somebody's of a forge: then it allows to look, and whatever the forge lets them do there.
ALTER TABLE ci.token ADD instance text CHECK (octet_length(instance) <= 2048), ADD login text CHECK (octet_length(login) <= 1000),
  ADD CHECK ((instance IS NULL) = (login IS NULL));

CREATE FUNCTION ci.create_member_token(p_name text, p_instance text, p_login text, p_expires_in interval) RETURNS text
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE v_secret text := ci.create_token(p_name, 'read', p_expires_in);
BEGIN
  UPDATE ci.token SET instance = p_instance, login = p_login WHERE name = p_name;
  RETURN v_secret;
END $$;

-- Whose token a secret is; no row: nobody's in particular, or it is no token any more.
CREATE FUNCTION ci.token_member(p_secret text) RETURNS TABLE (instance text, login text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT t.instance, t.login FROM ci.token_scope(p_secret) s JOIN ci.token t ON t.name = s.name WHERE t.instance IS NOT NULL
$$;

CREATE FUNCTION ci.member_tokens(p_instance text, p_login text) RETURNS TABLE (name text, expires_at text)
  LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT t.name, ci.moment(t.expires_at) FROM ci.token t
  WHERE t.instance = p_instance AND t.login = p_login AND (t.expires_at > ci.clock()) IS NOT FALSE ORDER BY t.name
$$;

-- False: they have no such token, whoever else may.
CREATE FUNCTION ci.revoke_member_token(p_name text, p_instance text, p_login text) RETURNS bool
  LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM ci.token WHERE name = p_name
    AND instance = p_instance AND login = p_login;                                          -- fence: own_token
  RETURN FOUND;
END $$;

REVOKE ALL ON FUNCTION ci.wait_for_consent, ci.forget_wait, ci.create_member_token, ci.token_member, ci.member_tokens, ci.revoke_member_token FROM PUBLIC;
GRANT EXECUTE ON FUNCTION ci.wait_for_consent, ci.create_member_token, ci.token_member, ci.member_tokens, ci.revoke_member_token TO harmonia_frontend;
