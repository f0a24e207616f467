//! Who may come in, and how far.

use harmonia_queue::people::{self, Scope};
use harmonia_queue::{Db, pages};
use harmonia_tests::farm::Farm;
use reqwest::Method;
use std::time::Duration;

use super::desk::{Desk, problem};
use super::reader::{Reader, cookie, csrf};

#[tokio::test]
async fn whoever_is_nobody_is_asked_who_they_are() {
    let desk = Desk::new().await;
    let reader = Reader::new(&desk);
    for path in ["/", "/queue", "/builds/1", "/live", "/admin"] {
        let answer = reader.get(path).await;
        assert_eq!(answer.status(), 303, "{path}");
        assert!(answer.headers()["location"].to_str().unwrap().starts_with("/sign-in?to="), "{path}");
    }
    let page = reader.page("/sign-in?to=/queue").await;
    assert!(page.contains("value=\"/queue\"") && !page.contains("Dashboard</h1>"), "{page}");
}

#[tokio::test]
async fn a_token_signs_in_for_as_long_as_it_is_one() {
    let desk = Desk::new().await;
    let token = people::create_token(&desk.farm.frontend, "laptop", Scope::Operate, None).await.unwrap();
    let reader = Reader::new(&desk);
    let answer = reader.send("/sign-in", &[("token", &token), ("to", "/nodes")]).await;
    assert_eq!(answer.headers()["location"], "/nodes");
    let set = answer.headers()["set-cookie"].to_str().unwrap();
    for words in ["HttpOnly", "SameSite=Lax", "Max-Age=86400", "Path=/"] {
        assert!(set.contains(words), "{set}");
    }
    assert!(!set.contains(&token) && !set.contains("Secure"), "{set}");
    let reader = Reader::signed_in(&desk, &token).await;
    assert!(reader.page("/nodes").await.contains("Sign out"));
    people::revoke_token(&desk.farm.frontend, "laptop").await.unwrap();
    assert_eq!(reader.get("/nodes").await.status(), 303);
}

#[tokio::test]
async fn a_token_that_has_expired_opens_nothing_and_ends_its_session() {
    let desk = Desk::new().await;
    let hour = Some(Duration::from_secs(3600));
    let token = people::create_token(&desk.farm.frontend, "short", Scope::Operate, hour).await.unwrap();
    let reader = Reader::signed_in(&desk, &token).await;
    assert_eq!(reader.get("/nodes").await.status(), 200);
    let past = "UPDATE ci.token SET expires_at = ci.clock() - interval '1 second' WHERE name = 'short'";
    desk.farm.database.execute(past).await;
    assert_eq!(reader.get("/nodes").await.status(), 303);
    assert_eq!(Reader::new(&desk).send("/sign-in", &[("token", &token)]).await.status(), 403);
    problem(desk.ask(Method::POST, "/api/builds/1/rebuild", Some(&token)), 401).await;
}

#[tokio::test]
async fn cookies_travel_safely_where_people_come_by_https() {
    let desk = Desk::with(Farm::new().await, &[("url", "https://ci.example.org")]).await;
    let answer =
        Reader::new(&desk).send_from("https://ci.example.org", "/sign-in", &[("token", &desk.read)]).await;
    let set = answer.headers()["set-cookie"].to_str().unwrap();
    assert!(set.starts_with("__Host-") && set.ends_with("; Secure"), "{set}");
}

#[tokio::test]
async fn a_wrong_token_signs_nobody_in() {
    let desk = Desk::new().await;
    let reader = Reader::new(&desk);
    for token in ["wrong", "' OR true --", &"x".repeat(10_000)] {
        let answer = reader.send("/sign-in", &[("token", token)]).await;
        assert_eq!(answer.status(), 403, "{token}");
        assert!(!answer.headers().contains_key("set-cookie"));
    }
}

#[tokio::test]
async fn a_cookie_that_is_forged_foreign_or_torn_is_nobodys() {
    let (desk, other) = (Desk::new().await, Desk::new().await);
    let mut reader = Reader::signed_in(&desk, &desk.read).await;
    let good = reader.cookie.clone().unwrap();
    // Databases of tests are copies of one.
    other.farm.database.execute("UPDATE ci.web_key SET secret = ci.new_secret()").await;
    let foreign = Reader::signed_in(&other, &other.admin).await.cookie.unwrap();
    assert_eq!(reader.get("/queue").await.status(), 200);
    let (text, tag) = good.rsplit_once('.').unwrap();
    for bad in
        [foreign, text.to_owned(), format!("{text}."), format!("{}x.{tag}", text), "harmonia-ci=".to_owned()]
    {
        reader.cookie = Some(bad.clone());
        assert_eq!(reader.get("/queue").await.status(), 303, "{bad}");
    }
}

#[tokio::test]
async fn a_form_of_another_site_or_session_does_nothing() {
    let desk = Desk::new().await;
    let (reader, other) =
        (Reader::signed_in(&desk, &desk.operate).await, Reader::signed_in(&desk, &desk.operate).await);
    let node = desk.farm.node_of(&desk.node).await;
    let drain = format!("/nodes/{node}/drain");
    let own = csrf(&reader.page("/nodes").await);
    let foreign = csrf(&other.page("/nodes").await);
    assert_eq!(reader.send_from("https://evil.example", &drain, &[("csrf", &own)]).await.status(), 403);
    assert_eq!(reader.send_from("null", &drain, &[("csrf", &own)]).await.status(), 403);
    assert_eq!(reader.send(&drain, &[]).await.status(), 403);
    assert_eq!(reader.send(&drain, &[("csrf", &foreign)]).await.status(), 403);
    assert_eq!(Reader::new(&desk).send(&drain, &[("csrf", &own)]).await.status(), 303);
    assert!(!reader.page("/nodes").await.contains("by hand"));
    assert_eq!(reader.send(&drain, &[("csrf", &own)]).await.headers()["location"], "/nodes");
}

#[tokio::test]
async fn nobody_does_what_their_scope_does_not_allow() {
    let desk = Desk::new().await;
    let looking = Reader::signed_in(&desk, &desk.read).await;
    let operating = Reader::signed_in(&desk, &desk.operate).await;
    let node = desk.farm.node_of(&desk.node).await;
    assert_eq!(looking.press("/nodes", &format!("/nodes/{node}/drain"), &[]).await.status(), 403);
    assert_eq!(operating.get("/admin").await.status(), 403);
    let made = operating.press("/nodes", "/admin/tokens", &[("name", "x"), ("scope", "admin")]).await;
    assert_eq!(made.status(), 403);
}

#[tokio::test]
async fn a_cookie_is_no_token_of_the_api() {
    let desk = Desk::new().await;
    let reader = Reader::signed_in(&desk, &desk.admin).await;
    assert_eq!(reader.get("/api/queue").await.status(), 401);
    let sent = reader.send("/api/nodes/1/drain", &[]).await;
    assert_eq!(sent.status(), 401);
}

#[tokio::test]
async fn a_link_signs_in_once() {
    let desk = Desk::new().await;
    let admin = Db::from_pool(desk.farm.database.admin());
    let once = pages::invite(&admin, Scope::Admin, Duration::from_secs(60)).await.unwrap();
    let mut reader = Reader::new(&desk);
    assert!(reader.page(&format!("/sign-in?once={once}")).await.contains("signs you in once"));
    let answer = reader.send("/sign-in/once", &[("once", &once)]).await;
    assert_eq!(answer.status(), 303);
    reader.cookie = Some(cookie(&answer));
    assert!(reader.page("/admin").await.contains("Tokens"));
    assert_eq!(Reader::new(&desk).send("/sign-in/once", &[("once", &once)]).await.status(), 403);
}

#[tokio::test]
async fn whoever_signs_out_is_nobody() {
    let desk = Desk::new().await;
    let reader = Reader::signed_in(&desk, &desk.read).await;
    let answer = reader.press("/nodes", "/sign-out", &[]).await;
    assert!(answer.headers()["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
}
