//! The pages of docs/recipes that show parts of an example: their code is that of the example, and their commands are
//! those of its header. tests/getting_started.sh follows the other pages.

/// The page, and the source of the example that it shows.
const WEBSOCKET: (&str, &str) = (
    include_str!("../../docs/recipes/websocket_editor.md"),
    include_str!("../../examples/websocket.rs"),
);

#[test]
fn code_and_commands_of_the_websocket_recipe_are_those_of_the_example() {
    let (page, source) = WEBSOCKET;
    let header = source.replace("//! ", "");
    for (language, count, source) in [
        ("rust,ignore", 1, source),
        ("sh", 2, &header),
        ("text", 1, &header),
    ] {
        let excerpts = blocks(page, language);
        assert_eq!(excerpts.len(), count, "{language}");
        for excerpt in excerpts {
            assert!(source.contains(excerpt), "not in the example:\n{excerpt}");
        }
    }
}

/// The contents of the blocks of code in one language.
pub(crate) fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let behind = page.split(fence.as_str()).skip(1);
    behind
        .filter_map(|behind| Some(behind.split_once("```")?.0))
        .collect()
}
