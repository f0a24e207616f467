//! The database's side of a pool: its login with a password, its row, and the Secret with which its builders log in.

use std::sync::Arc;
use std::time::Duration;

use harmonia_crds::BuilderPool;
use harmonia_queue::people::{Pool, Scope};
use harmonia_queue::{logins, mirror};
use harmonia_service::sentence::sentence;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use reqwest::Url;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::apply;
use crate::context::Lead;
use crate::credentials::{NoUrl, netrc, password, url_of};
use crate::pod::NETRC;
use crate::secrets::Contents;
use crate::tokens;

use super::mirrored::Word;
use super::numbers::Reach;
use super::{PoolError, Pools, build, scale};

/// A reconcile waits for the database for so long and no longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The key of the Secret with the URL, and the volume with it. The other is [`NETRC`].
pub const DATABASE_URL: &str = "database-url";
/// PostgreSQL's longest name, and what is left of a longer one before its hash.
const NAME: (usize, usize) = (63, 50);

/// Why the database's side is not as it should be.
#[derive(Debug, Error)]
pub enum Trouble {
    /// The queue said no, or cannot be asked.
    #[error(transparent)]
    Queue(#[from] harmonia_queue::Error),
    /// Nobody answered in time.
    #[error("the database did not answer within {} s", PATIENCE.as_secs())]
    Late,
    /// A file with a URL cannot be read.
    #[error(transparent)]
    Secret(#[from] harmonia_service::secret::SecretError),
    /// The operator's own URL is none.
    #[error(transparent)]
    Url(#[from] NoUrl),
}

/// The pool's name in the database.
pub fn name_of(meta: &ObjectMeta) -> String {
    format!("{}/{}", meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

/// The login of a pool's builders. A long name ends with a hash of the whole of it.
fn login_of(meta: &ObjectMeta) -> String {
    let name = name_of(meta);
    let login = format!("pool_{}", name.replace('/', "_"));
    if login.len() <= NAME.0 {
        return login;
    }
    let hash = format!("{:x}", Sha256::digest(&name));
    format!("{}_{}", &login[..login.floor_char_boundary(NAME.1)], &hash[..8])
}

/// Does not wait for long.
pub async fn bounded<T>(call: impl Future<Output = Result<T, harmonia_queue::Error>>) -> Result<T, Trouble> {
    Ok(tokio::time::timeout(PATIENCE, call).await.map_err(|_| Trouble::Late)??)
}

/// Brings the database in line with the pool, if this replica leads and the database answers. Answers whether it does: if it
/// does not, what is there goes on.
pub async fn mirror(pools: &Pools, pool: &BuilderPool) -> Result<Reach, PoolError> {
    let (context, known) = (&pools.context, pools.numbers.reach());
    let Some(lead) = context.lead() else { return Ok(Reach::No("the database is away".to_owned())) };
    if let Reach::No(_) = known {
        return Ok(known);
    }
    if pool.is_paused() {
        return Ok(known);
    }
    let meta = pool.meta();
    let (namespace, secret) =
        (meta.namespace.clone().unwrap_or_default(), build::child_name(&pool.name_any()));
    let contents =
        context.read_secret(&namespace, &secret).await.map_err(PoolError::api("read the pool's Secret"))?;
    let (name, held) = (name_of(meta), contents.clone().unwrap_or_default());
    let (uid, generation) = (meta.uid.as_deref().unwrap_or_default(), meta.generation.unwrap_or_default());
    if contents.is_some() && pools.mirrored.stands(&name, &Word::new(uid, generation, lead.generation, &held))
    {
        return Ok(Reach::Yes);
    }
    match write(pools, pool, &lead, held).await {
        Ok(wanted) => {
            let held = keep_secret(pools, pool, wanted, contents).await?;
            pools.mirrored.put(name, Word::new(uid, generation, lead.generation, &held));
            Ok(Reach::Yes)
        }
        Err(Trouble::Queue(harmonia_queue::Error::NotLeader(_))) => Err(PoolError::NotLeading),
        Err(Trouble::Queue(error)) if !error.is_transient() => Err(PoolError::Refused(error)),
        Err(error) => Ok(Reach::No(sentence(&error))),
    }
}

/// Login, row and token. Answers what the Secret should hold.
async fn write(
    pools: &Pools,
    pool: &BuilderPool,
    lead: &Lead,
    known: Arc<Contents>,
) -> Result<Contents, Trouble> {
    let (meta, spec, context) = (pool.meta(), &pool.spec, &pools.context);
    let (name, login) = (name_of(meta), login_of(meta));
    let mut wanted = Contents::new();
    if let Some(admin) = context.admin_url()? {
        let password = password_in(&known).unwrap_or_else(password);
        let url = url_of(&context.database.direct_url()?, &login, &password)?;
        bounded(logins::ensure(&admin, &login, &password, connections(scale::most(spec)))).await?;
        wanted.insert(DATABASE_URL.to_owned(), url);
    }
    let row = Pool {
        name: &name,
        login: &login,
        systems: spec.systems.clone(),
        features: Some(spec.features.clone()),
        mandatory_features: spec.mandatory_features.clone(),
        slots: spec.slots,
        memory: spec.memory.map_or(0, |memory| i64::try_from(memory.0).unwrap_or(i64::MAX)),
    };
    let resource = mirror::Resource {
        uid: meta.uid.as_deref().unwrap_or_default(),
        generation: meta.generation.unwrap_or_default(),
    };
    if !bounded(mirror::pool(&lead.db, lead.generation, resource, &row)).await? {
        tracing::debug!(name, "the database has heard a later word about this pool");
    }
    let frontend = &context.installation.frontend.url;
    let token = format!("pool {name}");
    let token = bounded(tokens::keep(&lead.db, &token, Scope::Read, token_in(&known))).await?;
    wanted.insert(NETRC.to_owned(), netrc(frontend, &token));
    Ok(wanted)
}

/// Sends nothing if the Secret is as it should be. Answers what it holds.
async fn keep_secret(
    pools: &Pools,
    pool: &BuilderPool,
    wanted: Contents,
    contents: Option<Arc<Contents>>,
) -> Result<Arc<Contents>, PoolError> {
    let context = &pools.context;
    let name = build::child_name(&pool.name_any());
    let cached = context.caches.secrets.get(&pool.namespace().unwrap_or_default(), &name);
    let ours = cached.is_some_and(|cached| {
        cached.owner_references().iter().any(|owner| Some(&owner.uid) == pool.meta().uid.as_ref())
    });
    let holds = |contents: &Contents| wanted.iter().all(|(key, value)| contents.get(key) == Some(value));
    if let Some(contents) = contents
        && ours
        && holds(&contents)
    {
        return Ok(contents);
    }
    let secret = Secret {
        metadata: build::metadata_of(pool, &name),
        data: Some(wanted.into_iter().map(|(key, value)| (key, ByteString(value.into_bytes()))).collect()),
        ..Secret::default()
    };
    let applied = apply::apply(context, secret, None).await?;
    Ok(context.secrets.remember(&applied))
}

fn password_in(contents: &Contents) -> Option<String> {
    let url = Url::parse(contents.get(DATABASE_URL)?).ok()?;
    url.password().map(str::to_owned)
}

fn token_in(contents: &Contents) -> Option<&str> {
    contents.get(NETRC)?.split_whitespace().skip_while(|word| *word != "password").nth(1)
}

/// A builder has two. During a rollout there are as many again that finish what they have, and some of them twice.
fn connections(builders: i32) -> i32 {
    builders.saturating_mul(4).saturating_add(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(namespace: &str, name: &str) -> ObjectMeta {
        ObjectMeta { namespace: Some(namespace.into()), name: Some(name.into()), ..ObjectMeta::default() }
    }

    #[test]
    fn a_login_is_named_after_the_pool() {
        assert_eq!(login_of(&meta("ci", "x86")), "pool_ci_x86");
    }

    #[test]
    fn long_names_stay_apart() {
        let namespace = "n".repeat(60);
        let (one, other) = (login_of(&meta(&namespace, "one")), login_of(&meta(&namespace, "other")));
        assert!(one.len() <= 63 && one != other, "{one} {other}");
        assert!(one.starts_with("pool_nnnn"), "{one}");
    }

    #[test]
    fn what_the_secret_holds_is_used_again() {
        let url = url_of("postgres://a:b@host/db", "login", "pa55word").unwrap_or_default();
        let contents = Contents::from([
            (DATABASE_URL.to_owned(), url),
            (NETRC.to_owned(), netrc("http://frontend.ci.svc", "t0ken")),
        ]);
        assert_eq!(password_in(&contents).as_deref(), Some("pa55word"));
        assert_eq!(token_in(&contents), Some("t0ken"));
        assert_eq!(token_in(&Contents::new()), None);
    }
}
