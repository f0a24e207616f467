//! Secrets that the operator makes for the roles and for people. Passwords and tokens are made once and live in the Secrets.

use harmonia_queue::logins;
use harmonia_queue::people::Scope;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use reqwest::Url;

use super::InstallationError;
use super::build::labels;
use super::config::{Installation, SecretKey};
use super::role::Role;
use crate::apply;
use crate::context::{Context, Lead};
use crate::credentials::{netrc, password, url_of};
use crate::pod::NETRC;
use crate::secrets::Contents;
use crate::tokens;

/// Enough for the roles at their defaults, twice over in a rollout.
const CONNECTIONS: i32 = 100;
const TOKEN: &str = "token";

/// The Secret with the evaluators' token of the cache.
pub fn netrc_secret(installation: &Installation) -> String {
    format!("{}-evaluator-netrc", installation.name)
}

/// The Secret with netrc files of private repositories, each under its namespace and name.
pub fn credentials_secret(installation: &Installation) -> String {
    format!("{}-credentials", installation.name)
}

/// Where a role's URL of the database is; made and kept here unless somebody else does. `anew`: a leader has just begun, and
/// sets the login right. The word changes with what the Secret holds.
pub async fn database(
    context: &Context,
    owner: &OwnerReference,
    role: Role,
    anew: bool,
) -> Result<(SecretKey, String), InstallationError> {
    let installation = &*context.installation;
    let (at, given) = role.database(installation);
    if given {
        let version = version(context, &at.secret)?;
        return Ok((at, version));
    }
    let known = read(context, &at.secret).await?;
    let known = known.as_deref().and_then(|known| known.get(&at.key)).cloned();
    // Without a database what is there goes on.
    let Some(_lead) = context.lead() else {
        return known.map(|url| (at.clone(), url)).ok_or(InstallationError::NoSecret(at.secret));
    };
    let admin = context.admin_url()?.ok_or(InstallationError::NoDatabase(role.name()))?;
    let password = known.as_deref().and_then(password_in).unwrap_or_else(password);
    let login = role.login(installation);
    let url = url_of(&context.database.direct_url()?, &login, &password)?;
    let settled = known.as_ref() == Some(&url);
    if anew || !settled {
        logins::ensure_in(&admin, role.group(), &login, &password, CONNECTIONS).await?;
    }
    if !settled {
        let wanted = [(at.key.clone(), url.clone())].into();
        write(context, owner, role.name(), &at.secret, wanted).await?;
    }
    Ok((at, url))
}

/// The evaluators' token of the cache. The word changes with it.
pub async fn evaluator_token(context: &Context, owner: &OwnerReference) -> Result<String, InstallationError> {
    let installation = &*context.installation;
    let secret = netrc_secret(installation);
    let known = read(context, &secret).await?;
    let known = known.as_deref().and_then(|known| known.get(NETRC)).cloned();
    let Some(Lead { db, .. }) = context.lead() else {
        return known.ok_or(InstallationError::NoSecret(secret));
    };
    let name = format!("evaluator of {}", installation.name);
    let token = tokens::keep(&db, &name, Scope::Read, known.as_deref().and_then(token_in)).await?;
    let wanted = netrc(&installation.frontend.url, &token);
    if known.as_ref() != Some(&wanted) {
        let contents = [(NETRC.to_owned(), wanted.clone())].into();
        write(context, owner, Role::Evaluator.name(), &secret, contents).await?;
    }
    Ok(wanted)
}

/// The first token of all, made if there is no Secret for it. What people do with either later on is theirs.
pub async fn admin_token(context: &Context, owner: &OwnerReference) -> Result<(), InstallationError> {
    let installation = &*context.installation;
    let (Some(at), Some(lead)) = (&installation.admin_token, context.lead()) else { return Ok(()) };
    if read(context, &at.secret).await?.is_some() {
        return Ok(());
    }
    let token = tokens::renew(&lead.db, &format!("admin of {}", installation.name), Scope::Admin).await?;
    write(context, owner, "operator", &at.secret, [(TOKEN.to_owned(), token)].into()).await
}

/// A word that changes with a Secret that somebody else keeps. Its contents are not looked at.
pub fn version(context: &Context, secret: &str) -> Result<String, InstallationError> {
    let cached = context.caches.secrets.get(&context.namespace, secret);
    let cached = cached.ok_or_else(|| InstallationError::NoSecret(secret.to_owned()))?;
    let uid = cached.uid().unwrap_or_default();
    Ok(format!("{uid} {}", cached.resource_version().unwrap_or_default()))
}

async fn read(
    context: &Context,
    secret: &str,
) -> Result<Option<std::sync::Arc<Contents>>, InstallationError> {
    context.read_secret(&context.namespace, secret).await.map_err(InstallationError::api("read a Secret"))
}

/// Writes a Secret of the installation's.
pub async fn write(
    context: &Context,
    owner: &OwnerReference,
    component: &str,
    name: &str,
    contents: Contents,
) -> Result<(), InstallationError> {
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(context.namespace.clone()),
            labels: Some(labels(&context.installation, component)),
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        data: Some(contents.into_iter().map(|(key, value)| (key, ByteString(value.into_bytes()))).collect()),
        ..Secret::default()
    };
    let applied = apply::apply(context, secret, None).await?;
    context.secrets.remember(&applied);
    Ok(())
}

fn password_in(url: &str) -> Option<String> {
    Url::parse(url).ok()?.password().map(str::to_owned)
}

fn token_in(netrc: &str) -> Option<&str> {
    netrc.split_whitespace().skip_while(|word| *word != "password").nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_secret_holds_is_used_again() {
        let url = url_of("postgres://a:b@host/db", "login", "pa55word").unwrap_or_default();
        assert_eq!(password_in(&url).as_deref(), Some("pa55word"));
        assert_eq!(token_in(&netrc("http://frontend.ci.svc", "t0ken")), Some("t0ken"));
    }
}
