//! Keys of several parts, optional parts, conditions, and cookies as the `cookie` crate reads them.

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::COOKIE;
use axum::http::request::Parts;
use tower_redlock::{KeyExtractor, LockKey, LockKeys, key};

#[test]
fn key_cookie_reads_random_headers_like_the_cookie_crate_or_refuses_them() {
    const PIECES: [&str; 24] = [
        "sid", "%73id", "SID", "=", "=", "=", ";", ";", " ", "\t", "\"", "%22", "%20", "%3B",
        "%3D", "%", "%5", "%00", "%ff", "A", "B", ",", "+", "%C3%A9",
    ];
    let mut random = fastrand::Rng::with_seed(12);
    let mut read = 0;
    for _ in 0..200_000 {
        let begin = if random.bool() { "sid=" } else { "" };
        let pieces = (0..random.usize(1..9)).map(|_| random.choice(PIECES).unwrap());
        let text: String = [begin].into_iter().chain(pieces).collect();
        let Ok(value) = HeaderValue::from_str(&text) else {
            continue;
        };
        let mut request = Request::new(());
        request.headers_mut().insert(COOKIE, value);
        let ours = key::cookie("sid").extract(&request.into_parts().0);
        // As axum-extra's `CookieJar::from_headers` does.
        let mut jar = cookie::CookieJar::new();
        let parse = |text: &str| cookie::Cookie::parse_encoded(text.to_owned()).ok();
        for cookie in text.split(';').filter_map(parse) {
            jar.add_original(cookie);
        }
        let Ok(ours) = ours else { continue };
        let theirs = jar.get("sid").map(|cookie| cookie.value_trimmed());
        let theirs = theirs.filter(|value| !value.is_empty());
        read += usize::from(theirs.is_some());
        let theirs = theirs.map(|value| LockKey::from(value).into());
        assert_eq!(ours, theirs, "{text:?}");
    }
    assert!(read > 10_000, "{read}");
}

#[derive(Clone)]
struct UserId(&'static str);

fn keys_of(extractor: &dyn KeyExtractor, user: Option<&'static str>) -> Option<LockKeys> {
    let mut request = Request::get("/?device=d").body(()).unwrap();
    if let Some(user) = user {
        request.extensions_mut().insert(UserId(user));
    }
    extractor.extract(&request.into_parts().0).unwrap()
}

#[test]
fn key_that_is_missing_is_so_in_every_combinator() {
    let user = || {
        key::from_fn(|parts| {
            let user = parts.extensions.get::<UserId>()?;
            Some(user.0).filter(|name| !name.is_empty())
        })
    };
    let device = || key::query("device");
    let some = |key: LockKey| Some(LockKeys::from(key));
    let rows: [(Box<dyn KeyExtractor>, _); 6] = [
        (Box::new(("user", user())), None),
        (Box::new(key::each(device(), user())), None),
        (Box::new(user().or(device())), some("d".into())),
        (
            Box::new(user().when(|_| true).or(device())),
            some("d".into()),
        ),
        (Box::new(user().hashed().or(user())), None),
        (
            Box::new(("x", user().or(device()))),
            some(("x", "d").into()),
        ),
    ];
    for (extractor, expected) in rows {
        for absent in [None, Some("")] {
            assert_eq!(keys_of(&*extractor, absent), expected);
        }
    }
    let there = keys_of(&("user", user()), Some("u"));
    assert_eq!(there, some(("user", "u").into()));
}

#[test]
fn key_or_behind_a_conditional_literal_is_not_constant() {
    let staff = || "staff".when(|parts: &Parts| parts.uri.path() == "/staff");
    assert!(!staff().or(key::query("device")).describe().is_constant);
    assert!(!staff().or("customers").describe().is_constant);
    assert!("staff".or(key::query("device")).describe().is_constant);
}
