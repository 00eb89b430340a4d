// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {CfaToken} from "./CfaToken.sol";
import {MOVE, Roles} from "./Roles.sol";

/// Moves all holders of a token to the token that replaces it, with their freezes.
///
/// Both tokens are fixed at the deployment: with another token as the partner, the right to call
/// parts would be one to mint or to burn. Both are paused until the last part. A part burns the
/// units of its holders in the old token and gives the same units in the new one. Parts are
/// accepted in order and once, and each is atomic. All units are moved when the old token's supply
/// is 0: nothing is read from outside but the list of addresses, and a wrong list moves nothing
/// wrong.
///
/// Needs the role REDEEM of the old token (of version 1: its agent) and MOVE of the new one.
contract Migration is Roles {
    uint256 public constant HOLDERS_MAX = 256;

    CfaToken public immutable oldToken;
    CfaToken public immutable newToken;
    uint256 public partsDone;

    event HolderMoved(address indexed holder, uint256 units, uint256 frozenUnits, bool frozen);
    event PartMoved(uint256 indexed part, uint256 units, uint256 left);

    error WrongPart(uint256 expected, uint256 given);
    error MalformedPart();
    error NotPaused(address token);
    error UnfitTokens();

    constructor(
        CfaToken oldToken_,
        CfaToken newToken_,
        address owner_,
        address[] memory accounts,
        uint256[] memory roles
    ) Roles(owner_, accounts, roles) {
        if (address(oldToken_) == address(newToken_)) revert UnfitTokens();
        if (oldToken_.decimals() != newToken_.decimals()) revert UnfitTokens();
        oldToken = oldToken_;
        newToken = newToken_;
    }

    /// A holder without units is passed over, unless it is frozen.
    function moveHolders(uint256 part, address[] calldata holders) external onlyRole(MOVE) {
        if (part != partsDone) revert WrongPart(partsDone, part);
        if (holders.length == 0 || holders.length > HOLDERS_MAX) revert MalformedPart();
        if (!oldToken.paused()) revert NotPaused(address(oldToken));
        if (!newToken.paused()) revert NotPaused(address(newToken));
        partsDone = part + 1;
        uint256 moved = 0;
        for (uint256 i = 0; i < holders.length; ++i) moved += _move(holders[i]);
        emit PartMoved(part, moved, oldToken.totalSupply());
    }

    function _move(address holder) private returns (uint256 units) {
        units = oldToken.balanceOf(holder);
        bool frozen = oldToken.isFrozen(holder);
        if (units == 0 && !frozen) return 0;
        uint256 frozenUnits = oldToken.getFrozenTokens(holder);
        if (units != 0) oldToken.burn(holder, units);
        newToken.takeOver(holder, units, frozenUnits, frozen);
        emit HolderMoved(holder, units, frozenUnits, frozen);
    }
}
